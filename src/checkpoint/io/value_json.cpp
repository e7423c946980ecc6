#include "checkpoint/io/value_json.h"

#include <bit>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

using nlohmann::json;

constexpr const char* kText = "text:";

std::string bits_of(double value) {
  return fmt::format("f64:{:016x}", std::bit_cast<uint64_t>(value));
}

double double_of(const std::string& text) {
  if (text.size() != 20 || text.rfind("f64:", 0) != 0 ||
      text.find_first_not_of("0123456789abcdef", 4) != std::string::npos) {
    throw UsageError("the scalar " + safetensors::in_quotes(text) +
                     " is neither an integer nor f64: and 16 hexadecimal digits");
  }
  return std::bit_cast<double>(static_cast<uint64_t>(std::stoull(text.substr(4), nullptr, 16)));
}

}  // namespace

json json_of(const ScalarValue& value) {
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  return bits_of(std::get<double>(value));
}

ScalarValue scalar_from_json(const json& value) {
  if (value.is_number_integer()) return value.get<int64_t>();
  return double_of(value.get<std::string>());
}

json json_of(const OptionValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) return *flag;
  if (const auto* integer = std::get_if<int64_t>(&value)) return *integer;
  if (const auto* number = std::get_if<double>(&value)) return bits_of(*number);
  if (const auto* text = std::get_if<std::string>(&value)) return kText + *text;
  if (const auto* texts = std::get_if<std::vector<std::string>>(&value)) return {{"texts", *texts}};
  json list = json::array();
  for (const double number : std::get<std::vector<double>>(value)) list.push_back(bits_of(number));
  return {{"doubles", list}};
}

OptionValue option_from_json(const json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  if (value.is_object() && value.contains("texts"))
    return value.at("texts").get<std::vector<std::string>>();
  if (value.is_object()) {
    std::vector<double> list;
    for (const auto& number : value.at("doubles"))
      list.push_back(double_of(number.get<std::string>()));
    return list;
  }
  const auto text = value.get<std::string>();
  if (text.rfind(kText, 0) == 0) return text.substr(std::char_traits<char>::length(kText));
  return double_of(text);
}

}  // namespace tessera::store

#include "fuzz/training/case.h"

#include <sstream>

#include <fmt/format.h>

namespace tessera::fuzz {

std::string Item::text(const std::string& name, const std::string& otherwise) const {
  const auto found = values.find(name);
  return found == values.end() ? otherwise : found->second;
}

int Item::number(const std::string& name, int otherwise) const {
  return has(name) ? std::stoi(text(name)) : otherwise;
}

double Item::real(const std::string& name, double otherwise) const {
  return has(name) ? std::stod(text(name)) : otherwise;
}

namespace {

std::string literal(const Item& item) {
  std::string values;
  for (const auto& [name, value] : item.values)
    values += fmt::format("{}{{\"{}\", \"{}\"}}", values.empty() ? "" : ", ", name, value);
  return values.empty() ? fmt::format("{{\"{}\"}}", item.kind)
                        : fmt::format("{{\"{}\", {{{}}}}}", item.kind, values);
}

std::string literals(const std::vector<Item>& items) {
  std::string list;
  for (const auto& item : items) list += fmt::format("                 {},\n", literal(item));
  return "{\n" + list + "             }";
}

std::string short_text(const Item& item) {
  std::string values;
  for (const auto& [name, value] : item.values)
    values += fmt::format("{}{}={}", values.empty() ? "" : " ", name, value);
  return values.empty() ? item.kind : fmt::format("{}({})", item.kind, values);
}

}  // namespace

std::string reproducer(const Case& which, const std::string& finding) {
  std::string comment;
  std::istringstream lines(finding);
  for (std::string line; std::getline(lines, line);) comment += "  // " + line + "\n";
  return fmt::format(
      "TEST(TrainingFuzz, Seed{0}) {{\n{1}"
      "  expect_sound({{\n"
      "      .seed = {0},\n"
      "      .world = {2},\n"
      "      .dtype = \"{3}\",\n"
      "      .layers = {4},\n"
      "      .optimizer = {5},\n"
      "      .wrapper = {6},\n"
      "      .story = {7},\n"
      "  }});\n"
      "}}\n",
      which.seed, comment, which.world, which.dtype, literals(which.layers),
      literal(which.optimizer), literal(which.wrapper), literals(which.story));
}

std::string one_line(const Case& which) {
  std::string text = fmt::format("world={} {} {} {} |", which.world, which.dtype,
                                 short_text(which.wrapper), short_text(which.optimizer));
  for (const auto& layer : which.layers) text += " " + short_text(layer);
  text += " |";
  for (const auto& event : which.story) text += " " + short_text(event);
  return text;
}

}  // namespace tessera::fuzz

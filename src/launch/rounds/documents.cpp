#include "launch/rounds/documents.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <nlohmann/json.hpp>

namespace tessera::launch {
namespace {

template <class Document>
std::string text_of(const Document& document) {
  // Texts of errors may not be UTF-8.
  return nlohmann::json(document).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

template <class Document>
std::optional<Document> document_in(const std::string& text) {
  try {
    return nlohmann::json::parse(text).get<Document>();
  } catch (const nlohmann::json::exception&) {
    return std::nullopt;
  }
}

}  // namespace

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(NodeDocument, node, incarnation, beat, host, settings, ranks,
                                   began, ended, end, cause_known, final, text, left)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Order, kind, round, nodes, incarnations, ranks, text, settings)

std::string NodeDocument::encode() const { return text_of(*this); }

std::optional<NodeDocument> NodeDocument::decode(const std::string& text) {
  auto document = document_in<NodeDocument>(text);
  if (document &&
      (document->ranks < 1 || document->end < End::none || document->end > End::followed))
    return std::nullopt;
  return document;
}

int Order::place_of(const NodeDocument& launcher) const {
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i] == launcher.node && incarnations[i] == launcher.incarnation)
      return static_cast<int>(i);
  return -1;
}

std::string Order::encode() const { return text_of(*this); }

std::optional<Order> Order::decode(const std::string& text) {
  auto order = document_in<Order>(text);
  if (!order) return order;
  const auto& ranks = order->ranks;
  const bool sound =
      order->kind <= Kind::over && order->nodes.size() == ranks.size() &&
      order->incarnations.size() == ranks.size() &&
      std::all_of(ranks.begin(), ranks.end(), [](int count) { return count > 0; }) &&
      std::accumulate(ranks.begin(), ranks.end(), int64_t{0}) <= std::numeric_limits<int>::max();
  return sound ? order : std::nullopt;
}

}  // namespace tessera::launch

#include "report/chart.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "report/html.h"

namespace tessera::report {
namespace {

constexpr double kWidth = 420, kHeight = 230, kLeft = 52, kRight = 12, kTop = 10, kBottom = 34;

struct Scale {
  double low, high, from, to;
  double operator()(double value) const {
    return from + (std::clamp(value, low, high) - low) / (high - low) * (to - from);
  }
};

Scale scale_of(std::vector<double> values, bool from_zero, bool cut_peaks, double from, double to) {
  std::sort(values.begin(), values.end());
  double low = values.front(), high = values.back();
  constexpr double kAlmostAll = 0.98, kRoom = 1.5;
  const auto most = static_cast<size_t>(kAlmostAll * static_cast<double>(values.size() - 1));
  if (cut_peaks) high = std::min(high, kRoom * values[most]);
  if (from_zero) low = std::min(low, 0.0);
  if (!(high > low)) {
    const double room = low == 0 ? 1 : std::fabs(low) / 10;
    low -= from_zero ? 0 : room;
    high += room;
  }
  return {low, high, from, to};
}

/// About five multiples of a step in the range: 1, 2 or 5 times a power of ten. Between near
/// neighbours of a large number no step is representable.
std::vector<double> ticks(const Scale& scale) {
  constexpr int kMost = 10;
  const double rough = (scale.high - scale.low) / 5, power = std::pow(10, floor(log10(rough)));
  const double step = power * (power >= rough       ? 1
                               : 2 * power >= rough ? 2
                               : 5 * power >= rough ? 5
                                                    : 10);
  const double first = std::ceil(scale.low / step) * step;
  std::vector<double> values;
  for (int i = 0; i < kMost; ++i) {
    const double value = first + i * step;
    if (!(value <= scale.high + step / 1000)) break;
    if (values.empty() || value > values.back())
      values.push_back(std::fabs(value) < step / 1000 ? 0 : value);
  }
  return values;
}

/// The smallest and the largest value of each of `parts` ranges, in order.
Points reduced(const Points& points, size_t parts) {
  if (points.size() <= 2 * parts) return points;
  Points result;
  for (size_t part = 0; part < parts; ++part) {
    const auto place = [&](size_t i) {
      return points.begin() + static_cast<std::ptrdiff_t>(i * points.size() / parts);
    };
    const auto begin = place(part), end = place(part + 1);
    const auto gap =
        std::find_if(begin, end, [](const auto& p) { return !std::isfinite(p.second); });
    auto [low, high] = std::minmax_element(begin, end, [](const auto& a, const auto& b) {
      return std::isfinite(a.second) && (!std::isfinite(b.second) || a.second < b.second);
    });
    if (low > high) std::swap(low, high);
    result.push_back(*low);
    if (gap != end && gap != low && gap != high) result.push_back(*gap);
    if (high != low) result.push_back(*high);
  }
  return result;
}

std::string text_at(const char* anchor, double x, double y, const std::string& text) {
  return fmt::format("<text class=tick text-anchor={} x={:.1f} y={:.1f}>{}</text>", anchor, x, y,
                     escaped(text));
}

std::string line_at(const std::string& classes, double x1, double x2, double y1, double y2,
                    const std::string& title = "") {
  return fmt::format("<line class='{}' x1={:.1f} x2={:.1f} y1={:.1f} y2={:.1f}>{}</line>", classes,
                     x1, x2, y1, y2, title.empty() ? "" : "<title>" + escaped(title) + "</title>");
}

std::string axes(const Scale& x, const Scale& y, const std::string& x_name) {
  constexpr double kEnd = kWidth - kRight, kFoot = kHeight - kBottom;
  std::string svg;
  for (const double value : ticks(y))
    svg += line_at("grid", kLeft, kEnd, y(value), y(value)) +
           text_at("end", kLeft - 6, y(value) + 4, shown(value));
  for (const double value : ticks(x)) svg += text_at("middle", x(value), kFoot + 16, shown(value));
  return svg + line_at("axis", kLeft, kEnd, kFoot, kFoot) +
         text_at("end", kEnd, kHeight - 3, x_name);
}

std::string curve(const Line& line, const Scale& x, const Scale& y) {
  std::string dots, path;
  bool drawing = false;
  for (const auto& [at, value] : reduced(line.points, 300)) {
    const bool draw = std::isfinite(value);
    if (draw) path += fmt::format("{}{:.1f} {:.1f}", drawing ? "L" : "M", x(at), y(value));
    if (draw && line.dotted)
      dots +=
          fmt::format("<circle class=c{} cx={:.1f} cy={:.1f} r=2.6><title>{}: {}</title></circle>",
                      line.colour, x(at), y(value), shown(at), shown(value));
    drawing = draw;
  }
  return fmt::format("<path class='line c{}{}' d='{}'/>{}", line.colour, line.dotted ? " eval" : "",
                     path, dots);
}

std::string legend_of(const Line& line) {
  const auto last = std::find_if(line.points.rbegin(), line.points.rend(),
                                 [](const auto& point) { return std::isfinite(point.second); });
  if (last == line.points.rend()) return "";
  return fmt::format("<span><i class='c{}{}'></i>{} <b>{}</b></span> ", line.colour,
                     line.dotted ? " eval" : "", escaped(line.name), shown(last->second));
}

}  // namespace

std::string svg_of(const Chart& chart) {
  std::vector<double> xs, ys;
  for (const auto& line : chart.lines) {
    for (const auto& [at, value] : line.points) {
      if (!std::isfinite(value)) continue;
      xs.push_back(at);
      ys.push_back(value);
    }
  }
  if (xs.empty()) return "";
  constexpr double kFoot = kHeight - kBottom;
  const Scale x = scale_of(xs, false, false, kLeft, kWidth - kRight);
  const Scale y = scale_of(ys, chart.from_zero, chart.cut_peaks, kFoot, kTop);
  std::string svg = axes(x, y, chart.x_name), legend;
  for (const auto& mark : chart.marks) {
    if (mark.x < x.low || mark.x > x.high) continue;
    svg += line_at(fmt::format("mark c{}{}", mark.colour, mark.short_tick ? " short" : ""),
                   x(mark.x), x(mark.x), mark.short_tick ? kFoot - 8 : kTop, kFoot, mark.title);
  }
  for (const auto& line : chart.lines) svg += curve(line, x, y), legend += legend_of(line);
  const auto above = std::count_if(ys.begin(), ys.end(), [&](double v) { return v > y.high; });
  if (above > 0)
    legend += fmt::format("<span>{} above {}, drawn at the edge</span>", above, shown(y.high));
  return fmt::format(
      "<figure><figcaption>{0}</figcaption><svg viewBox='0 0 {1} {2}' role=img aria-label='{0}'>"
      "{3}</svg><p class=legend>{4}</p></figure>\n",
      escaped(chart.title), kWidth, kHeight, svg, legend);
}

}  // namespace tessera::report

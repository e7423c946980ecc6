#include "report/svg_chart.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "report/numbers.h"

namespace tessera::report {
namespace {

constexpr double kWidth = 420, kHeight = 230, kLeft = 52, kRight = 12, kTop = 10, kBottom = 34;

struct Scale {
  double low = 0, high = 1, from = 0, to = 1;
  double operator()(double value) const {
    return from + (std::clamp(value, low, high) - low) / (high - low) * (to - from);
  }
};

/// 1, 2 or 5 times a power of ten, so that the range has about five steps.
double tick_step(double range) {
  const double rough = range / 5, power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= rough) return factor * power;
  return 10 * power;
}

Scale scale_of(std::vector<double> values, bool from_zero, bool cut_peaks) {
  std::sort(values.begin(), values.end());
  double low = values.front(), high = values.back();
  if (cut_peaks) {
    constexpr double kAlmostAll = 0.98, kRoom = 1.5;
    const auto at = static_cast<size_t>(kAlmostAll * static_cast<double>(values.size() - 1));
    high = std::min(high, kRoom * values[at]);
  }
  if (from_zero) low = std::min(low, 0.0);
  if (!(high > low)) {
    const double room = low == 0 ? 1 : std::fabs(low) / 10;
    low -= from_zero ? 0 : room;
    high += room;
  }
  return {low, high, 0, 1};
}

/// The smallest and the largest value of each of `parts` ranges, in order.
Points reduced(const Points& points, size_t parts) {
  if (points.size() <= 2 * parts) return points;
  Points result;
  for (size_t part = 0; part < parts; ++part) {
    const auto begin = points.begin() + static_cast<std::ptrdiff_t>(part * points.size() / parts);
    const auto end =
        points.begin() + static_cast<std::ptrdiff_t>((part + 1) * points.size() / parts);
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

/// The multiples of a step in the range. Near neighbours of a large number have no step that adds
/// anything to them.
std::vector<double> ticks(const Scale& scale) {
  constexpr int kMost = 10;
  const double step = tick_step(scale.high - scale.low);
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

std::string axis(const Scale& x, const Scale& y, const std::string& x_name) {
  std::string svg;
  for (const double value : ticks(y)) {
    const double at = y(value);
    svg += fmt::format("<line class=grid x1={} x2={} y1={:.1f} y2={:.1f} />", kLeft,
                       kWidth - kRight, at, at) +
           fmt::format("<text class=tick text-anchor=end x={} y={:.1f}>{}</text>", kLeft - 6,
                       at + 4, shown(value));
  }
  for (const double value : ticks(x)) {
    svg += fmt::format("<text class=tick text-anchor=middle x={:.1f} y={}>{}</text>", x(value),
                       kHeight - kBottom + 16, shown(value));
  }
  svg += fmt::format("<line class=axis x1={} x2={} y1={} y2={} />", kLeft, kWidth - kRight,
                     kHeight - kBottom, kHeight - kBottom);
  svg += fmt::format("<text class=tick text-anchor=end x={} y={}>{}</text>", kWidth - kRight,
                     kHeight - 3, escaped(x_name));
  return svg;
}

std::string line_of(const Line& line, const Scale& x, const Scale& y) {
  std::string svg, path;
  const Points points = reduced(line.points, 300);
  bool drawing = false;
  for (const auto& [at, value] : points) {
    if (!std::isfinite(value)) {
      drawing = false;
      continue;
    }
    path += fmt::format("{}{:.1f} {:.1f}", drawing ? "L" : "M", x(at), y(value));
    drawing = true;
    if (line.dotted) {
      svg +=
          fmt::format("<circle class=c{} cx={:.1f} cy={:.1f} r=2.6><title>{}: {}</title></circle>",
                      line.colour, x(at), y(value), escaped(shown(at)), shown(value));
    }
  }
  return fmt::format("<path class='line c{}{}' d='{}'/>", line.colour, line.dotted ? " eval" : "",
                     path) +
         svg;
}

std::string legend(const Chart& chart, const std::string& note) {
  std::string html;
  for (const auto& line : chart.lines) {
    const auto last = std::find_if(line.points.rbegin(), line.points.rend(),
                                   [](const auto& point) { return std::isfinite(point.second); });
    if (last == line.points.rend()) continue;
    html += fmt::format("<span><i class='c{}{}'></i>{} <b>{}</b></span> ", line.colour,
                        line.dotted ? " eval" : "", escaped(line.name), shown(last->second));
  }
  return html + (note.empty() ? "" : "<span>" + note + "</span>");
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
  Scale x = scale_of(xs, false, false), y = scale_of(ys, chart.from_zero, chart.cut_peaks);
  x.from = kLeft, x.to = kWidth - kRight;
  y.from = kHeight - kBottom, y.to = kTop;
  std::string svg = axis(x, y, chart.x_name);
  for (const auto& mark : chart.marks) {
    if (mark.x < x.low || mark.x > x.high) continue;
    svg += fmt::format(
        "<line class='mark c{}{}' x1={:.1f} x2={:.1f} y1={} y2={}><title>{}</title></line>",
        mark.colour, mark.short_tick ? " short" : "", x(mark.x), x(mark.x),
        mark.short_tick ? kHeight - kBottom - 8 : kTop, kHeight - kBottom, escaped(mark.title));
  }
  for (const auto& line : chart.lines) svg += line_of(line, x, y);
  const auto above = std::count_if(ys.begin(), ys.end(), [&](double v) { return v > y.high; });
  const std::string note =
      above > 0 ? fmt::format("{} above {}, drawn at the edge", above, shown(y.high)) : "";
  return fmt::format(
      "<figure><figcaption>{}</figcaption><svg viewBox='0 0 {} {}' role=img aria-label='{}'>{}"
      "</svg><p class=legend>{}</p></figure>\n",
      escaped(chart.title), kWidth, kHeight, escaped(chart.title), svg, legend(chart, note));
}

}  // namespace tessera::report

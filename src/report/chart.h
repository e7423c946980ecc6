#pragma once

#include <string>
#include <vector>

#include "report/run_log.h"

namespace tessera::report {

/// One line of a chart.
struct Line {
  std::string name;
  Points points;
  size_t colour = 0;    ///< of the page's list of colours
  bool dotted = false;  ///< with a dot at each point, as for evaluations
};

/// A vertical mark at `x`, such as a restart.
struct Mark {
  double x = 0;
  size_t colour = 0;
  std::string title;
  bool short_tick = false;  ///< a tick at the lower edge: a checkpoint
};

struct Chart {
  std::string title, x_name = "step";
  std::vector<Line> lines;
  std::vector<Mark> marks;
  bool from_zero = false;  ///< the y axis begins at 0
  bool cut_peaks = false;  ///< values far above almost all others are drawn at the upper edge
};

/// The chart as a <figure> with an inline SVG and a legend. Long lines are reduced to the smallest
/// and the largest value of each of several hundred ranges of x. "" where no line has a point.
std::string svg_of(const Chart& chart);

}  // namespace tessera::report

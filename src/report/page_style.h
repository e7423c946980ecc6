#pragma once

namespace tessera::report {

/// The style sheet of the page: one column on a phone, light or dark as the reader's system is. The
/// colours of series are those of Okabe and Ito (Color Universal Design, 2008), which readers with
/// colour blindness can distinguish. They are darker on light and lighter on dark.
inline constexpr const char* kStyle =
    R"css(
:root { color-scheme: light dark; --text: #1c2024; --dim: #60676f; --page: #ffffff; --card: #f6f7f8;
  --edge: #d8dce0; --c0: #0072b2; --c1: #c75500; --c2: #00815d; --c3: #b04a86; --c4: #8a6d00;
  --c5: #3a87c0; --c6: #5a5a5a; --c7: #a02c2c; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e8ea; --dim: #9aa3ab; --page: #15181b;
  --card: #1e2226; --edge: #3a4047; --c0: #56b4e9; --c1: #f0903c; --c2: #2fc296; --c3: #dd92bd;
  --c4: #e8d44d; --c5: #8cc8f0; --c6: #b4b4b4; --c7: #ee7777; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 16px; background: var(--page);
  color: var(--text); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 4px 0 12px; } h2 { font-size: 17px; margin: 26px 0 8px; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr));
  gap: 12px; }
figure { margin: 0; padding: 10px; background: var(--card); border: 1px solid var(--edge);
  border-radius: 6px; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; }
.tick { fill: var(--dim); font-size: 11px; } .grid line.grid, line.grid { stroke: var(--edge); }
line.axis { stroke: var(--dim); }
.line { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.line.eval { stroke-dasharray: 4 3; }
line.mark { stroke-dasharray: 2 3; opacity: 0.8; } line.mark.short { stroke-dasharray: none; }
.legend { margin: 6px 0 0; font-size: 13px; color: var(--dim); overflow-wrap: anywhere; }
.legend span { display: inline-block; margin-right: 12px; }
.legend b { color: var(--text); font-weight: 600; }
.legend i { display: inline-block; width: 14px; height: 3px; margin-right: 5px;
  vertical-align: middle; }
.legend i.eval { height: 7px; width: 7px; border-radius: 4px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--edge);
  white-space: nowrap; vertical-align: top; } th { color: var(--dim); font-weight: 600; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 120px; }
.bar { display: inline-block; height: 9px; background: var(--c0); border-radius: 2px; }
.note { color: var(--dim); font-size: 14px; max-width: 80ch; } details { margin: 8px 0; }
summary { cursor: pointer; }
@media (max-width: 600px) { body { padding: 10px; font-size: 14px; }
  table { font-size: 12.5px; } th, td { padding-right: 9px; } td.long { min-width: 80px; } }
)css"
    // Classes c0 to c7 colour strokes of lines, fills of dots and bars of legends alike.
    ".c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}"
    ".c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}"
    ".line,.mark{stroke:var(--c)}circle{fill:var(--c)}.legend i{background:var(--c)}\n";

inline constexpr unsigned kColours = 8;

}  // namespace tessera::report

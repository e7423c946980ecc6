"""Sources with deliberate mistakes, each behind a look at the environment variable TESSERA_BREAK:
for fuzz_breaks.py and mutate_streams.py."""
import contextlib


def chosen(name):
    """An expression in C++: TESSERA_BREAK has this name."""
    return ('[] { static const char* const tessera_break = std::getenv("TESSERA_BREAK"); '
            f'return tessera_break && std::string(tessera_break) == "{name}"; }}()')


@contextlib.contextmanager
def changed(sources, change):
    """`change` (of path and text) is made in the files `sources`. They are put back, whatever
    happens."""
    original = {path: path.read_text() for path in sources}
    includes = "".join(f"#include <{name}>\n" for name in ("cstdlib", "optional", "string"))
    try:
        for path, text in original.items():
            path.write_text(includes + change(path, text))
        yield
    finally:
        for path, text in original.items():
            path.write_text(text)

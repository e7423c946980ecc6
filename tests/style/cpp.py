"""Classes and functions of C++ sources, found by their braces.

The reader knows no types and expands no macros. It looks at the text in front of each brace at
namespace or class scope, which is enough for sources that clang-format has formatted."""
import re
from dataclasses import dataclass, field

BLANKED = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<raw>[^()\\ ]*)\(.*?\)(?P=raw)"'
    r'|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    r'|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*', re.S | re.M)
CLASS = re.compile(r"(?:class|struct|union)\s+(?:[A-Z_]+\s+)?(?P<name>[\w:]+)(?:\s+final)?\s*"
                   r"(?::(?!:).*)?", re.S)
NO_MEMBER = re.compile(r"(using|typedef|friend|static_assert|enum|template\s+friend)\b")


@dataclass
class Class:
    name: str
    line: int
    functions: list = field(default_factory=list)
    members: list = field(default_factory=list)  # (name, declaration)


@dataclass
class Function:
    name: str
    line: int
    lines: int  # from the first line of its declaration to its closing brace


def blank(text):
    """`text` with comments, literals and directives as spaces; lines stay where they are."""
    def spaces(match):
        quoted = match[0][0] in "\"'R"
        return re.sub(r"[^\n]", " ", match[0]) if not quoted else '"' + re.sub(
            r"[^\n]", " ", match[0][1:-1]) + '"'
    return BLANKED.sub(spaces, text)


def without_templates(text):
    """`text` without attributes and the arguments of templates, and with operators as words."""
    text = re.sub(r"operator\s*(\(\s*\)|\[\s*\]|[^\s\w(]+)", "operator_", text)
    text = re.sub(r"->", "  ", re.sub(r"\[\[.*?\]\]", "", text, flags=re.S))
    text = re.sub(r"\b(alignas|decltype|noexcept|explicit|requires)\s*\((?:[^()]|\([^()]*\))*\)",
                  "", text)
    while (less := re.sub(r"<[^<>]*>", "", text)) != text:
        text = less
    return text


def closing(text, at):
    """Where the bracket at `at` is closed."""
    depth = 0
    for found in re.compile(r"[(){}\[\]]").finditer(text, at):
        depth += 1 if found[0] in "({[" else -1
        if depth == 0:
            return found.start()
    raise ValueError("a bracket is never closed")


class Reader:
    """Fills `classes` and `functions` from one source."""

    def __init__(self, text):
        self.text = blank(text)
        self.classes, self.functions = [], []
        self.scope(0, len(self.text), None)

    def line(self, at):
        return self.text.count("\n", 0, at) + 1

    def scope(self, at, end, owner):
        """Reads the declarations in [at, end) of a namespace or of the class `owner`."""
        begin = at
        stop = re.compile(r"[;{(\[]|\b(?:public|protected|private)\s*:(?!:)")
        while found := stop.search(self.text, at, end):
            at = found.end()
            if found[0] in "([":
                at = closing(self.text, found.start()) + 1
            elif found[0] == ";":
                self.declare(self.text[begin:found.start()], begin, owner)
                begin = at
            elif found[0] == "{":
                at, begin = self.brace(begin, found.start(), end, owner)
            else:
                begin = at

    def brace(self, begin, at, end, owner):
        """Reads what the brace at `at` opens; returns where to go on, and where a declaration
        that goes on there began."""
        head, close = self.text[begin:at], closing(self.text, at)
        first = begin + len(head) - len(head.lstrip())
        plain = re.sub(r"^\s*template\b\s*", "", without_templates(head)).strip()
        named = CLASS.fullmatch(plain)
        if re.match(r"(inline\s+)?namespace\b", plain) or re.fullmatch(r'extern\s*"\s*"', plain):
            self.scope(at + 1, close, None)
            return close + 1, close + 1
        if named:
            name = (owner.name + "::" if owner else "") + named["name"]
            found = Class(name, self.line(first))
            self.classes.append(found)
            self.scope(at + 1, close, found)
            rest = re.compile(r"\s*;").match(self.text, close + 1)
            return (rest.end(), rest.end()) if rest else (close + 1, close + 1)
        goes_on = self.text[close + 1:end].lstrip()[:1] in ("{", ",")
        if "(" in plain and not goes_on and not re.search(r"[^=!<>]=(?!=)", plain.split("(")[0]):
            self.function(plain, first, close, owner)
            return close + 1, close + 1
        return close + 1, begin  # an initializer

    def function(self, plain, first, close, owner):
        name = plain.split("(")[0].split()[-1] if plain.split("(")[0].split() else "?"
        self.functions.append(
            Function(name, self.line(first), self.line(close) - self.line(first) + 1))
        if owner:
            owner.functions.append(name)

    def declare(self, declaration, begin, owner):
        """Counts one declaration that ends with a semicolon, in a class."""
        plain = without_templates(declaration).strip()
        if not owner or not plain or NO_MEMBER.match(plain):
            return
        if re.fullmatch(r"(class|struct|union)\s+\w+", plain):
            return
        pointer = re.search(r"\(\s*\*\s*(\w+)", plain)
        before = re.split(r"[={]", plain)[0]
        if "(" in before and not pointer:
            if not re.search(r"=\s*(default|delete)$", plain):
                owner.functions.append(before.split("(")[0].split()[-1])
        elif not re.match(r"(static\s+|inline\s+)*constexpr\b", plain):
            bare = re.sub(r"\[[^\]]*\]", "", plain)
            while (less := re.sub(r"\{[^{}]*\}|\([^()]*\)", "", bare)) != bare:
                bare = less
            for part in [pointer[1]] if pointer else bare.split(","):
                words = re.findall(r"\w+", re.split(r"=|:(?!:)", part.replace("::", ""))[0])
                if words:
                    owner.members.append((words[-1], " ".join(declaration.split())))

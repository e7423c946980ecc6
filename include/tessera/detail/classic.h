#pragma once

#include <locale>
#include <utility>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// A stream for text that a program reads or writes, such as Classic<std::ostringstream>. The
/// global locale, which may group digits ("12.345"), does not apply to it.
template <class Stream>
class Classic : public Stream {
 public:
  template <class... Arguments>
  explicit Classic(Arguments&&... arguments) : Stream(std::forward<Arguments>(arguments)...) {
    this->imbue(std::locale::classic());
  }
};

}  // namespace tessera::detail
#pragma GCC visibility pop

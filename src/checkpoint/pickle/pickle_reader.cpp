#include "checkpoint/pickle/pickle_reader.h"

#include <bit>
#include <charconv>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/allowed_names.h"
#include "checkpoint/pickle/pickle_stack.h"
#include "tessera/error.h"

namespace tessera::pickle {
namespace {

using safetensors::in_quotes;

/// The machine of a pickle: its opcodes, and a memo.
class Machine {
 public:
  Machine(const std::string& where, std::string pickle, bool tensor_ids)
      : where_(where), tensor_ids_(tensor_ids), text_(where, values_.pickle) {
    values_.pickle = std::move(pickle);
  }

  Values run() {
    while (!stopped_) step(text_.byte());
    values_.pickle.resize(text_.at());
    values_.pickle.shrink_to_fit();
    return std::move(values_);
  }

 private:
  [[noreturn]] void forbid(const std::string& what) const {
    throw UsageError(
        where_ + "asks Python for " + what +
        ", which Tessera does not run or read; expected tensors, numbers, texts, dicts, "
        "lists and tuples: save the state dicts alone with torch.save");
  }

  // --- names, calls, storages ---

  void push_global(const Value& module, const Value& name) {
    if (module.kind != Kind::text || name.kind != Kind::text) text_.refuse("a name is not a text");
    if (module.piece.bytes > kMaxGlobal || name.piece.bytes > kMaxGlobal)
      text_.refuse(fmt::format("it asks for a name of more than {} bytes", kMaxGlobal));
    const bool known = is_allowed(values_.text(module), values_.text(name));
    stack_.push(stack_.node(known ? Kind::global : Kind::foreign, {module, name}));
    if (!known && !is_cpp_module(values_.text(module), values_.text(name)))
      note(values_.global_name(stack_.top()));
  }

  void note(const std::string& name) {
    if (!noted_.insert(name).second) return;
    stack_.charge(2 * (sizeof name + name.size()));
    values_.foreign.push_back(name);
  }

  void push_set(std::vector<Value> items) {
    note("set");
    stack_.push(stack_.node(Kind::set, std::move(items)));
  }

  void call() {
    const Value arguments = stack_.pop(), function = stack_.pop();
    if (arguments.kind != Kind::tuple) text_.refuse("a call has no tuple of arguments");
    if (function.kind == Kind::foreign) {
      const auto& name = values_.items(function);
      return stack_.push(stack_.node(Kind::foreign, {name[0], name[1], arguments}));
    }
    if (function.kind != Kind::global) text_.refuse("it calls a value that is not a name");
    const auto& given = values_.items(arguments);
    const auto name = values_.text(values_.items(function)[1]);
    if (name == "OrderedDict") return push_ordered_dict(given);
    if (name == "Size") {
      if (given.size() != 1 || given[0].kind != Kind::tuple)
        text_.refuse("a torch.Size is no tuple");
      return stack_.push(given[0]);
    }
    if (name.starts_with("_rebuild_parameter")) {
      if (given.empty() || (given[0].kind != Kind::tensor && given[0].kind != Kind::foreign))
        text_.refuse("a parameter is no tensor");
      return stack_.push(given[0]);
    }
    if (name == "_rebuild_tensor_v2" || name == "_rebuild_tensor_v3")
      return push_tensor(given, name.back() == '3');
    forbid("a call of " + in_quotes(values_.global_name(function)));
  }

  void push_ordered_dict(const std::vector<Value>& given) {
    std::vector<Value> items;
    if (given.size() > 1 || (given.size() == 1 && given[0].kind != Kind::list))
      text_.refuse("an OrderedDict has other arguments than a list");
    if (given.size() == 1) {
      for (const auto& pair : values_.items(given[0])) {
        if ((pair.kind != Kind::list && pair.kind != Kind::tuple) ||
            values_.items(pair).size() != 2)
          text_.refuse("an OrderedDict has an item that is no pair");
        items.insert(items.end(), values_.items(pair).begin(), values_.items(pair).end());
      }
    }
    stack_.push(stack_.node(Kind::dict, std::move(items)));
  }

  /// v2: storage, offset, size, stride, requires_grad, hooks[, metadata]; v3 has the dtype before
  /// the metadata.
  void push_tensor(const std::vector<Value>& given, bool v3) {
    const size_t metadata = v3 ? 7 : 6;
    if (given.size() < metadata || given.size() > metadata + 1 || given[0].kind != Kind::storage ||
        given[1].kind != Kind::integer || given[2].kind != Kind::tuple ||
        given[3].kind != Kind::tuple || (v3 && given[6].kind != Kind::global))
      text_.refuse("a tensor has other arguments than PyTorch writes");
    if (given.size() > metadata && given[metadata].kind == Kind::dict) {
      if (values_.items(given[metadata]).size() > kMaxMetadata)
        text_.refuse("a tensor has more metadata than PyTorch writes");
      for (const auto& value : values_.items(given[metadata]))
        if (value.kind == Kind::boolean && value.integer != 0)
          forbid("a tensor with a conjugate or negative bit");
    }
    std::vector<Value> items(given.begin(), given.begin() + 4);
    if (v3) items.push_back(given[6]);
    stack_.push(stack_.node(Kind::tensor, std::move(items)));
  }

  void push_storage() {
    const Value id = stack_.pop();
    if (id.kind == Kind::text && tensor_ids_) {
      stack_.push(stack_.node(Kind::tensor, {id}));
      stack_.charge(sizeof(Value));
      return values_.tensor_ids.push_back(stack_.top());
    }
    if (id.kind != Kind::tuple) text_.refuse("a persistent id is no tuple");
    const auto& given = values_.items(id);
    // Before PyTorch 1.6, a class of Python with its source.
    if (given.size() > 1 && given[0].kind == Kind::text && values_.text(given[0]) == "module")
      return stack_.push(given[1]);
    if (given.size() < 5 || given[0].kind != Kind::text || values_.text(given[0]) != "storage" ||
        (given[1].kind != Kind::global && given[1].kind != Kind::foreign) ||
        given[2].kind != Kind::text || given[4].kind != Kind::integer)
      text_.refuse("a persistent id is no storage");
    if (given.size() > 5 && given[5].kind != Kind::none) forbid("a view of a storage");
    stack_.push(stack_.node(Kind::storage, {given[1], given[2], given[4]}));
    stack_.charge(sizeof(Value));
    values_.storages.push_back(stack_.top());
  }

  // --- the memo ---

  void put(uint64_t index) {
    const Value value = stack_.top();
    if (memo_.emplace(index, value).second) stack_.charge(4 * sizeof(Value));
    else memo_[index] = value;
  }
  void get(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end())
      text_.refuse(fmt::format("it uses the memo {}, which is not set", index));
    stack_.push(found->second);
  }

  // --- opcodes ---

  void step(unsigned char code) {
    if (!step_text(code) && !step_number(code) && !step_container(code)) step_other(code);
  }

  /// Texts, bytes and their lengths.
  bool step_text(unsigned char code) {
    struct Opcode {
      unsigned char code;
      Kind kind;
      size_t length_bytes;
    };
    static constexpr Opcode kOpcodes[] = {{'X', Kind::text, 4},    {0x8c, Kind::text, 1},
                                          {0x8d, Kind::text, 8},   {'T', Kind::text, 4},
                                          {'U', Kind::text, 1},  // Python 2's strings
                                          {'B', Kind::opaque, 4},  {'C', Kind::opaque, 1},
                                          {0x8e, Kind::opaque, 8}, {0x96, Kind::opaque, 8}};
    for (const auto& opcode : kOpcodes) {
      if (opcode.code != code) continue;
      stack_.push(text_.piece(opcode.kind, text_.number(opcode.length_bytes)));
      return true;
    }
    return false;
  }

  bool step_number(unsigned char code) {
    switch (code) {
      case 'N':
        stack_.push(Value());
        return true;
      case 0x88:
      case 0x89:
        stack_.push_integer(Kind::boolean, code == 0x88 ? 1 : 0);
        return true;
      case 'J':
        stack_.push_integer(Kind::integer, static_cast<int32_t>(text_.number(4)));
        return true;
      case 'K':
      case 'M':
        stack_.push_integer(Kind::integer, static_cast<int64_t>(text_.number(code == 'K' ? 1 : 2)));
        return true;
      case 0x8a:
      case 0x8b:
        push_long(text_.number(code == 0x8a ? 1 : 4));
        return true;
      case 'I': {  // of Python 2, beyond 32 bits
        const auto digits = values_.text(text_.line());
        int64_t value = 0;
        const auto end = std::from_chars(digits.begin(), digits.end(), value);
        if (end.ec != std::errc() || end.ptr != digits.end())
          text_.refuse("an integer has other digits");
        stack_.push_integer(Kind::integer, value);
        return true;
      }
      case 'G':
        push_real();
        return true;
      default:
        return false;
    }
  }

  void push_long(uint64_t bytes) {
    if (bytes > 8) return stack_.push(text_.piece(Kind::opaque, bytes));
    uint64_t value = text_.number(bytes);
    if (bytes > 0 && bytes < 8 && (value >> (8 * bytes - 1)) != 0)
      value |= ~uint64_t{0} << 8 * bytes;
    stack_.push_integer(Kind::integer, static_cast<int64_t>(value));
  }

  void push_real() {
    const char* from = text_.take(8);
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | static_cast<unsigned char>(from[i]);
    Value value;
    value.kind = Kind::real;
    value.real = std::bit_cast<double>(bits);
    stack_.push(value);
  }

  bool step_container(unsigned char code) {
    switch (code) {
      case '(':
        stack_.mark();
        return true;
      case '}':
      case ']':
      case ')':
        stack_.push(stack_.node(code == '}'   ? Kind::dict
                                : code == ']' ? Kind::list
                                              : Kind::tuple,
                                {}));
        return true;
      case 't':
      case 'l':
      case 'd':
        push_marked(code == 't' ? Kind::tuple : code == 'l' ? Kind::list : Kind::dict);
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        stack_.push_tuple(code - 0x84);
        return true;
      case 'a':
      case 's':
        stack_.add_popped(code == 'a' ? Kind::list : Kind::dict, code == 'a' ? 1 : 2);
        return true;
      case 'e':
      case 'u':
        stack_.add_marked(code == 'e' ? Kind::list : Kind::dict);
        return true;
      case 0x90:
        stack_.add_marked(Kind::set);
        return true;
      case 0x8f:
        push_set({});
        return true;
      case 0x91:
        push_set(stack_.pop_to_mark());
        return true;
      default:
        return false;
    }
  }

  void push_marked(Kind kind) {
    auto items = stack_.pop_to_mark();
    if (kind == Kind::dict && items.size() % 2 != 0) text_.refuse("a key has no value");
    stack_.push(stack_.node(kind, std::move(items)));
  }

  void step_other(unsigned char code) {
    switch (code) {
      case 0x80:
        return check_protocol(text_.byte());
      case 0x95:
        text_.take(8);
        return;
      case '.':
        return stop();
      case 'q':
      case 'r':
        return put(text_.number(code == 'q' ? 1 : 4));
      case 0x94:
        return put(memo_.size());
      case 'h':
      case 'j':
        return get(text_.number(code == 'h' ? 1 : 4));
      case 'c': {
        const Value module = text_.line(), name = text_.line();
        return push_global(module, name);
      }
      case 0x93: {
        const Value name = stack_.pop(), module = stack_.pop();
        return push_global(module, name);
      }
      case 'R':
      case 0x81:
        return call();  // NEWOBJ of an allowed class is a call
      case 'Q':
        return push_storage();
      case 'b':
        return take_state();
      case '0':
        stack_.pop();
        return;
      case '1':
        stack_.pop_to_mark();
        return;
      case 0x92: {
        const Value named = stack_.pop();
        call();
        stack_.push(named);
        return take_state();
      }
      case 'i':
      case 'o':
        forbid("the construction of an object");
      case 0x82:
      case 0x83:
      case 0x84:
        forbid("an extension");
      default:
        text_.refuse(fmt::format("opcode 0x{:02x} is not one that PyTorch writes", code));
    }
  }

  void check_protocol(int protocol) {
    if (protocol < 2 || protocol > 5)
      text_.refuse(fmt::format("its protocol is {}; expected 2 to 5", protocol));
  }

  void take_state() {
    const Value state = stack_.pop(), object = stack_.top();
    if (object.kind == Kind::foreign) {
      const auto& items = values_.items(object);
      // A C++ module consists of its attributes.
      if (state.kind != Kind::dict ||
          !is_cpp_module(values_.text(items[0]), values_.text(items[1])))
        return stack_.add(Kind::foreign, {state});
      stack_.pop();
      stack_.push(state);
    } else if (object.kind != Kind::dict) {  // whose _metadata and other attributes are not needed
      forbid("the state of an object");
    }
  }

  void stop() {
    values_.root = stack_.pop();
    if (!stack_.empty()) text_.refuse("values are left on its stack");
    stopped_ = true;
  }

  static constexpr size_t kMaxMetadata = 64;  // keys and values; PyTorch writes conj and neg
  static constexpr size_t kMaxGlobal = 256;   // bytes of the name of a module or class

  const std::string& where_;
  const bool tensor_ids_;
  Values values_;
  Text text_;
  Stack stack_{text_, values_};
  bool stopped_ = false;
  std::unordered_map<uint64_t, Value> memo_;
  std::unordered_set<std::string> noted_;
};

}  // namespace

Values read_pickle(const std::string& where, std::string pickle, bool tensor_ids) {
  if (pickle.size() > kMaxPickleBytes)
    throw UsageError(fmt::format("{}its pickle has {} bytes; expected at most {}", where,
                                 pickle.size(), kMaxPickleBytes));
  return Machine(where, std::move(pickle), tensor_ids).run();
}

}  // namespace tessera::pickle

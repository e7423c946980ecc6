#include "checkpoint/pickle/pickle_reader.h"

#include <bit>
#include <charconv>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/allowed_names.h"
#include "tessera/error.h"

namespace tessera::pickle {
namespace {

using safetensors::in_quotes;

/// The machine of a pickle: a stack with marks, and a memo.
class Machine {
 public:
  Machine(const std::string& where, std::string pickle, bool tensor_ids)
      : where_(where), tensor_ids_(tensor_ids) {
    values_.pickle = std::move(pickle);
  }

  Values run() {
    while (!stopped_) step(byte());
    values_.pickle.resize(at_);
    values_.pickle.shrink_to_fit();
    return std::move(values_);
  }

 private:
  [[noreturn]] void refuse(const std::string& reason) const {
    throw UsageError(fmt::format("{}is no sound pickle: {}, at byte {}", where_, reason, at_));
  }
  [[noreturn]] void forbid(const std::string& what) const {
    throw UsageError(
        where_ + "asks Python for " + what +
        ", which Tessera does not run or read; expected tensors, numbers, texts, dicts, "
        "lists and tuples: save the state dicts alone with torch.save");
  }

  // --- the pickle's text ---

  const char* take(uint64_t bytes) {
    if (bytes > values_.pickle.size() - at_) refuse("it ends too early");
    const char* from = values_.pickle.data() + at_;
    at_ += bytes;
    return from;
  }
  unsigned char byte() { return static_cast<unsigned char>(*take(1)); }
  uint64_t number(size_t bytes) {
    const char* from = take(bytes);
    uint64_t value = 0;
    for (size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(from[i]);
    return value;
  }
  Value piece(Kind kind, uint64_t bytes) {
    Value value;
    value.kind = kind;
    value.piece = {static_cast<uint32_t>(at_), static_cast<uint32_t>(bytes)};
    take(bytes);
    return value;
  }
  Value line() {
    const size_t end = values_.pickle.find('\n', at_);
    if (end == std::string::npos) refuse("it ends too early");
    const Value value = piece(Kind::text, end - at_);
    ++at_;
    return value;
  }

  // --- values ---

  void charge(size_t bytes) {
    charged_ += bytes;
    if (charged_ > kMaxValueBytes)
      refuse(fmt::format("its values take more than {} bytes", kMaxValueBytes));
  }
  void push(const Value& value) {
    if (stack_.size() == stack_.capacity()) charge(sizeof(Value) * (stack_.size() + 1));
    stack_.push_back(value);
  }
  void push_integer(Kind kind, int64_t integer) {
    Value value;
    value.kind = kind;
    value.integer = integer;
    push(value);
  }
  Value node(Kind kind, std::vector<Value> items) {
    charge(sizeof(std::vector<Value>) + items.capacity() * sizeof(Value) + 16);
    Value value;
    value.kind = kind;
    value.node = static_cast<uint32_t>(values_.nodes.size());
    values_.nodes.push_back(std::move(items));
    return value;
  }
  Value pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) refuse("its stack is empty");
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }
  std::vector<Value> pop_to_mark() {
    if (marks_.empty()) refuse("a mark is missing");
    std::vector<Value> items(stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back()),
                             stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  void push_tuple(size_t count) {
    std::vector<Value> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    push(node(Kind::tuple, std::move(items)));
  }
  const Value& top() const {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) refuse("its stack is empty");
    return stack_.back();
  }
  void add(Kind kind, const std::vector<Value>& items) {
    if (top().kind != kind && top().kind != Kind::foreign)
      refuse("it adds items to no " + std::string(kind == Kind::dict ? "dict" : "list or set"));
    if (kind == Kind::dict && items.size() % 2 != 0) refuse("a key has no value");
    auto& to = values_.nodes[top().node];
    const size_t before = to.capacity();
    to.insert(to.end(), items.begin(), items.end());
    charge((to.capacity() - before) * sizeof(Value));
  }
  void add_marked(Kind kind) {
    const auto items = pop_to_mark();
    add(kind, items);
  }
  void add_popped(Kind kind, size_t count) {
    std::vector<Value> items(count);
    for (size_t i = count; i-- > 0;) items[i] = pop();
    add(kind, items);
  }

  // --- names, calls, storages ---

  void push_global(const Value& module, const Value& name) {
    if (module.kind != Kind::text || name.kind != Kind::text) refuse("a name is not a text");
    if (module.piece.bytes > kMaxGlobal || name.piece.bytes > kMaxGlobal)
      refuse(fmt::format("it asks for a name of more than {} bytes", kMaxGlobal));
    const bool known = is_allowed(values_.text(module), values_.text(name));
    push(node(known ? Kind::global : Kind::foreign, {module, name}));
    if (!known && !is_cpp_module(values_.text(module), values_.text(name)))
      note(values_.global_name(stack_.back()));
  }

  void note(const std::string& name) {
    if (!noted_.insert(name).second) return;
    charge(2 * (sizeof name + name.size()));
    values_.foreign.push_back(name);
  }

  void push_set(std::vector<Value> items) {
    note("set");
    push(node(Kind::set, std::move(items)));
  }

  void call() {
    const Value arguments = pop(), function = pop();
    if (arguments.kind != Kind::tuple) refuse("a call has no tuple of arguments");
    if (function.kind == Kind::foreign) {
      const auto& name = values_.items(function);
      return push(node(Kind::foreign, {name[0], name[1], arguments}));
    }
    if (function.kind != Kind::global) refuse("it calls a value that is not a name");
    const auto& given = values_.items(arguments);
    const auto name = values_.text(values_.items(function)[1]);
    if (name == "OrderedDict") return push_ordered_dict(given);
    if (name == "Size") {
      if (given.size() != 1 || given[0].kind != Kind::tuple) refuse("a torch.Size is no tuple");
      return push(given[0]);
    }
    if (name.starts_with("_rebuild_parameter")) {
      if (given.empty() || (given[0].kind != Kind::tensor && given[0].kind != Kind::foreign))
        refuse("a parameter is no tensor");
      return push(given[0]);
    }
    if (name == "_rebuild_tensor_v2" || name == "_rebuild_tensor_v3")
      return push_tensor(given, name.back() == '3');
    forbid("a call of " + in_quotes(values_.global_name(function)));
  }

  void push_ordered_dict(const std::vector<Value>& given) {
    std::vector<Value> items;
    if (given.size() > 1 || (given.size() == 1 && given[0].kind != Kind::list))
      refuse("an OrderedDict has other arguments than a list");
    if (given.size() == 1) {
      for (const auto& pair : values_.items(given[0])) {
        if ((pair.kind != Kind::list && pair.kind != Kind::tuple) ||
            values_.items(pair).size() != 2)
          refuse("an OrderedDict has an item that is no pair");
        items.insert(items.end(), values_.items(pair).begin(), values_.items(pair).end());
      }
    }
    push(node(Kind::dict, std::move(items)));
  }

  /// v2: storage, offset, size, stride, requires_grad, hooks[, metadata]; v3 has the dtype before
  /// the metadata.
  void push_tensor(const std::vector<Value>& given, bool v3) {
    const size_t metadata = v3 ? 7 : 6;
    if (given.size() < metadata || given.size() > metadata + 1 || given[0].kind != Kind::storage ||
        given[1].kind != Kind::integer || given[2].kind != Kind::tuple ||
        given[3].kind != Kind::tuple || (v3 && given[6].kind != Kind::global))
      refuse("a tensor has other arguments than PyTorch writes");
    if (given.size() > metadata && given[metadata].kind == Kind::dict) {
      if (values_.items(given[metadata]).size() > kMaxMetadata)
        refuse("a tensor has more metadata than PyTorch writes");
      for (const auto& value : values_.items(given[metadata]))
        if (value.kind == Kind::boolean && value.integer != 0)
          forbid("a tensor with a conjugate or negative bit");
    }
    std::vector<Value> items(given.begin(), given.begin() + 4);
    if (v3) items.push_back(given[6]);
    push(node(Kind::tensor, std::move(items)));
  }

  void push_storage() {
    const Value id = pop();
    if (id.kind == Kind::text && tensor_ids_) {
      push(node(Kind::tensor, {id}));
      charge(sizeof(Value));
      return values_.tensor_ids.push_back(stack_.back());
    }
    if (id.kind != Kind::tuple) refuse("a persistent id is no tuple");
    const auto& given = values_.items(id);
    // Before PyTorch 1.6, a class of Python with its source.
    if (given.size() > 1 && given[0].kind == Kind::text && values_.text(given[0]) == "module")
      return push(given[1]);
    if (given.size() < 5 || given[0].kind != Kind::text || values_.text(given[0]) != "storage" ||
        (given[1].kind != Kind::global && given[1].kind != Kind::foreign) ||
        given[2].kind != Kind::text || given[4].kind != Kind::integer)
      refuse("a persistent id is no storage");
    if (given.size() > 5 && given[5].kind != Kind::none) forbid("a view of a storage");
    push(node(Kind::storage, {given[1], given[2], given[4]}));
    charge(sizeof(Value));
    values_.storages.push_back(stack_.back());
  }

  // --- the memo ---

  void put(uint64_t index) {
    const Value value = top();
    if (memo_.emplace(index, value).second) charge(4 * sizeof(Value));
    else memo_[index] = value;
  }
  void get(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse(fmt::format("it uses the memo {}, which is not set", index));
    push(found->second);
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
      push(piece(opcode.kind, number(opcode.length_bytes)));
      return true;
    }
    return false;
  }

  bool step_number(unsigned char code) {
    switch (code) {
      case 'N':
        push(Value());
        return true;
      case 0x88:
      case 0x89:
        push_integer(Kind::boolean, code == 0x88 ? 1 : 0);
        return true;
      case 'J':
        push_integer(Kind::integer, static_cast<int32_t>(number(4)));
        return true;
      case 'K':
      case 'M':
        push_integer(Kind::integer, static_cast<int64_t>(number(code == 'K' ? 1 : 2)));
        return true;
      case 0x8a:
      case 0x8b:
        push_long(number(code == 0x8a ? 1 : 4));
        return true;
      case 'I': {  // of Python 2, beyond 32 bits
        const auto digits = values_.text(line());
        int64_t value = 0;
        const auto end = std::from_chars(digits.begin(), digits.end(), value);
        if (end.ec != std::errc() || end.ptr != digits.end()) refuse("an integer has other digits");
        push_integer(Kind::integer, value);
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
    if (bytes > 8) return push(piece(Kind::opaque, bytes));
    uint64_t value = number(bytes);
    if (bytes > 0 && bytes < 8 && (value >> (8 * bytes - 1)) != 0)
      value |= ~uint64_t{0} << 8 * bytes;
    push_integer(Kind::integer, static_cast<int64_t>(value));
  }

  void push_real() {
    const char* from = take(8);
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | static_cast<unsigned char>(from[i]);
    Value value;
    value.kind = Kind::real;
    value.real = std::bit_cast<double>(bits);
    push(value);
  }

  bool step_container(unsigned char code) {
    switch (code) {
      case '(':
        charge(sizeof(size_t));
        marks_.push_back(stack_.size());
        return true;
      case '}':
      case ']':
      case ')':
        push(node(code == '}' ? Kind::dict : code == ']' ? Kind::list : Kind::tuple, {}));
        return true;
      case 't':
      case 'l':
      case 'd':
        push_marked(code == 't' ? Kind::tuple : code == 'l' ? Kind::list : Kind::dict);
        return true;
      case 0x85:
      case 0x86:
      case 0x87:
        push_tuple(code - 0x84);
        return true;
      case 'a':
      case 's':
        add_popped(code == 'a' ? Kind::list : Kind::dict, code == 'a' ? 1 : 2);
        return true;
      case 'e':
      case 'u':
        add_marked(code == 'e' ? Kind::list : Kind::dict);
        return true;
      case 0x90:
        add_marked(Kind::set);
        return true;
      case 0x8f:
        push_set({});
        return true;
      case 0x91:
        push_set(pop_to_mark());
        return true;
      default:
        return false;
    }
  }

  void push_marked(Kind kind) {
    auto items = pop_to_mark();
    if (kind == Kind::dict && items.size() % 2 != 0) refuse("a key has no value");
    push(node(kind, std::move(items)));
  }

  void step_other(unsigned char code) {
    switch (code) {
      case 0x80:
        return check_protocol(byte());
      case 0x95:
        take(8);
        return;
      case '.':
        return stop();
      case 'q':
      case 'r':
        return put(number(code == 'q' ? 1 : 4));
      case 0x94:
        return put(memo_.size());
      case 'h':
      case 'j':
        return get(number(code == 'h' ? 1 : 4));
      case 'c': {
        const Value module = line(), name = line();
        return push_global(module, name);
      }
      case 0x93: {
        const Value name = pop(), module = pop();
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
        pop();
        return;
      case '1':
        pop_to_mark();
        return;
      case 0x92: {
        const Value named = pop();
        call();
        push(named);
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
        refuse(fmt::format("opcode 0x{:02x} is not one that PyTorch writes", code));
    }
  }

  void check_protocol(int protocol) {
    if (protocol < 2 || protocol > 5)
      refuse(fmt::format("its protocol is {}; expected 2 to 5", protocol));
  }

  void take_state() {
    const Value state = pop(), object = top();
    if (object.kind == Kind::foreign) {
      const auto& items = values_.items(object);
      // The attributes of a C++ module are all that it has.
      if (state.kind == Kind::dict && is_cpp_module(values_.text(items[0]), values_.text(items[1])))
        stack_.back() = state;
      else add(Kind::foreign, {state});
    } else if (object.kind != Kind::dict) {  // whose _metadata and other attributes are not needed
      forbid("the state of an object");
    }
  }

  void stop() {
    values_.root = pop();
    if (!stack_.empty() || !marks_.empty()) refuse("values are left on its stack");
    stopped_ = true;
  }

  static constexpr size_t kMaxMetadata = 64;  // keys and values; PyTorch writes conj and neg
  static constexpr size_t kMaxGlobal = 256;   // bytes of the name of a module or class

  const std::string& where_;
  const bool tensor_ids_;
  Values values_;
  size_t at_ = 0;
  size_t charged_ = 0;
  bool stopped_ = false;
  std::vector<Value> stack_;
  std::vector<size_t> marks_;
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

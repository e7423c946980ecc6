#pragma once

#include <concepts>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera::detail {

// Finds the tensors in an argument of forward: a tensor, or a vector, array, map, optional, pair or
// tuple of them, nested to any depth.

template <class T>
struct TensorsIn {
  static constexpr bool any = false;
};

template <>
struct TensorsIn<at::Tensor> {
  static constexpr bool any = true;
  template <class Visit>
  static void visit(at::Tensor& tensor, Visit&& visit_one) {
    visit_one(tensor);
  }
};

/// True if a T can hold tensors and can be copied, so that the tensors in the copy can be replaced.
template <class T>
inline constexpr bool holds_tensors = TensorsIn<T>::any&& std::is_copy_constructible_v<T>;

template <class T>
concept RangeOfValues = requires(T value) {
  typename T::value_type;
  requires !std::same_as<typename T::value_type, T>;
  { *value.begin() } -> std::same_as<typename T::value_type&>;
};

template <class T>
concept MapOfValues = RangeOfValues<T> && requires {
  typename T::mapped_type;
};

template <class T>
concept OptionalValue = requires(T value) {
  typename T::value_type;
  { value.has_value() } -> std::convertible_to<bool>;
  { *value } -> std::same_as<typename T::value_type&>;
};

template <RangeOfValues T>
struct TensorsIn<T> {
  static constexpr bool any = TensorsIn<typename T::value_type>::any;
  template <class Visit>
  static void visit(T& values, Visit&& visit_one) {
    for (auto& value : values) TensorsIn<typename T::value_type>::visit(value, visit_one);
  }
};

template <MapOfValues T>
struct TensorsIn<T> {
  static constexpr bool any = TensorsIn<typename T::mapped_type>::any;
  template <class Visit>
  static void visit(T& values, Visit&& visit_one) {
    for (auto& entry : values) TensorsIn<typename T::mapped_type>::visit(entry.second, visit_one);
  }
};

template <OptionalValue T>
struct TensorsIn<T> {
  static constexpr bool any = TensorsIn<typename T::value_type>::any;
  template <class Visit>
  static void visit(T& value, Visit&& visit_one) {
    if (value.has_value()) TensorsIn<typename T::value_type>::visit(*value, visit_one);
  }
};

template <class... T>
struct TensorsIn<std::tuple<T...>> {
  static constexpr bool any = (TensorsIn<T>::any || ...);
  template <class Visit>
  static void visit(std::tuple<T...>& values, Visit&& visit_one) {
    const auto visit_if_any = [&]<class Value>(Value& value) {
      if constexpr (TensorsIn<Value>::any) TensorsIn<Value>::visit(value, visit_one);
    };
    std::apply([&](auto&... value) { (visit_if_any(value), ...); }, values);
  }
};

template <class A, class B>
struct TensorsIn<std::pair<A, B>> {
  static constexpr bool any = TensorsIn<A>::any || TensorsIn<B>::any;
  template <class Visit>
  static void visit(std::pair<A, B>& values, Visit&& visit_one) {
    if constexpr (TensorsIn<A>::any) TensorsIn<A>::visit(values.first, visit_one);
    if constexpr (TensorsIn<B>::any) TensorsIn<B>::visit(values.second, visit_one);
  }
};

}  // namespace tessera::detail
#pragma GCC visibility pop

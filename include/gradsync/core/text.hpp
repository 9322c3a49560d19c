// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

#ifdef __NVCC__  // reports assignments to a [[nodiscard]] class as dropped results; its host compiler reports real ones
#pragma nv_diag_suppress 2810
#ifdef __clang__  // nvcc hands it designated initialisers in an older spelling
#pragma clang diagnostic ignored "-Wgnu-designator"
#endif
#endif

namespace gradsync::inline v0_2::detail {

/// A part of a text: characters, an enumerator that has a name, or a number. It does not copy characters, so use it
/// within one expression only.
class TextPart {
public:
    TextPart(const char* characters) : characters_(characters) {}
    TextPart(const std::string& characters) : TextPart(std::string_view(characters)) {}
    TextPart(std::string_view characters)
        : characters_(characters.data()), bits_(characters.size()), kind_(Kind::counted) {}
    template <class T>
        requires requires(T enumerator) { std::string_view{name_of(enumerator)}; }
    TextPart(T enumerator) : TextPart(std::string_view(name_of(enumerator))) {}
    template <std::signed_integral T>
    TextPart(T number) : bits_(static_cast<std::uint64_t>(number)), kind_(Kind::with_sign) {}
    template <std::unsigned_integral T>
    TextPart(T number) : bits_(number), kind_(Kind::without_sign) {}
    TextPart(double number) : bits_(std::bit_cast<std::uint64_t>(number)), kind_(Kind::real) {}  ///< six digits at most
    TextPart(char) = delete;
    TextPart(bool) = delete;

    void append_to(std::string& text) const {
        char real[32];
        switch (kind_) {
            case Kind::literal: text += characters_; return;
            case Kind::counted: text.append(characters_, bits_); return;
            case Kind::with_sign: text += std::to_string(static_cast<std::int64_t>(bits_)); return;
            case Kind::without_sign: text += std::to_string(bits_); return;
            case Kind::real:
                text.append(real, static_cast<std::size_t>(
                                      std::snprintf(real, sizeof real, "%g", std::bit_cast<double>(bits_))));
        }
    }

private:
    enum class Kind : std::uint8_t { literal, counted, with_sign, without_sign, real };

    const char* characters_ = nullptr;
    std::uint64_t bits_ = 0;  ///< the length, or the number
    Kind kind_ = Kind::literal;
};

[[gnu::cold, gnu::noinline]] inline std::string join(std::initializer_list<TextPart> parts) {
    std::string text;
    for (const TextPart& part : parts) part.append_to(text);
    return text;
}

/// One text of several parts: `text("bucket ", b, " of ", name)`. A chain of `std::string + ...` would compile its
/// clean-up code in each place that can throw; this is one call.
template <class... Parts>
[[gnu::always_inline]] inline std::string text(const Parts&... parts) {
    return join({TextPart(parts)...});
}

/// 17 digits: different numbers get different texts.
[[gnu::cold, gnu::noinline]] inline std::string text_of(double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.17g", x);
    return text;
}

/// The name of an enumerator of an enumeration that counts from 0. The number may have come from another process.
template <class Enum>
constexpr std::string_view name_in(std::initializer_list<std::string_view> names, Enum enumerator) noexcept {
    return static_cast<std::size_t>(enumerator) < names.size() ? names.begin()[static_cast<std::size_t>(enumerator)]
                                                               : "nonsense";
}

/// The parts of a list as one text, such as "2, 3, 5".
template <class Range>
std::string joined(const Range& list, const char* separator = ", ") {
    std::string all;
    for (const auto& part : list) all += text(all.empty() ? "" : separator, part);
    return all;
}

}  // namespace gradsync::inline v0_2::detail

// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

namespace gradsync::inline v0_2::detail {

/// A part of a text: characters, an enumerator that has a name, or a number. Characters are not copied: a part is for one expression.
class TextPart {
public:
    TextPart(const char* characters) : characters_(characters) {}
    TextPart(const std::string& characters) : characters_(characters) {}
    TextPart(std::string_view characters) : characters_(characters) {}
    template <class T>
        requires requires(T enumerator) { std::string_view{name_of(enumerator)}; }
    TextPart(T enumerator) : characters_(name_of(enumerator)) {}
    template <std::signed_integral T>
    TextPart(T number) : kind_(Kind::with_sign), bits_(static_cast<std::uint64_t>(number)) {}
    template <std::unsigned_integral T>
    TextPart(T number) : kind_(Kind::without_sign), bits_(number) {}
    TextPart(double number) : kind_(Kind::real), real_(number) {}  ///< six digits at most
    TextPart(char) = delete;
    TextPart(bool) = delete;

    void append_to(std::string& text) const {
        char real[32];
        switch (kind_) {
            case Kind::characters: text += characters_; return;
            case Kind::with_sign: text += std::to_string(static_cast<std::int64_t>(bits_)); return;
            case Kind::without_sign: text += std::to_string(bits_); return;
            case Kind::real: text.append(real, static_cast<std::size_t>(std::snprintf(real, sizeof real, "%g", real_)));
        }
    }

private:
    enum class Kind : std::uint8_t { characters, with_sign, without_sign, real };

    Kind kind_ = Kind::characters;
    std::string_view characters_;
    std::uint64_t bits_ = 0;
    double real_ = 0;
};

[[gnu::cold, gnu::noinline]] inline std::string join(std::initializer_list<TextPart> parts) {
    std::string text;
    for (const TextPart& part : parts) part.append_to(text);
    return text;
}

/// One text of several parts: `text("bucket ", b, " of ", name)`. A chain of `std::string + ...` would be compiled, with what cleans up
/// after it, in each place that can throw; this is one call.
template <class... Parts>
[[gnu::always_inline]] inline std::string text(const Parts&... parts) {
    return join({TextPart(parts)...});
}

}  // namespace gradsync::inline v0_2::detail

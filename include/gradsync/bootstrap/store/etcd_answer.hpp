// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// @file
/// Internal: reads what etcd's JSON gateway answers, and trusts none of it. Keys and values are base64 there.

namespace gradsync::inline v0_2::etcd {

inline constexpr std::string_view base64_digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

inline std::string to_base64(std::string_view bytes) {
    std::string text;
    text.reserve((bytes.size() + 2) / 3 * 4);
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        unsigned group = 0;
        for (std::size_t k = i; k < i + 3; ++k)
            group = group << 8 | (k < bytes.size() ? static_cast<unsigned char>(bytes[k]) : 0u);
        for (std::size_t k = 0; k < 4; ++k)
            text += i + k > bytes.size() ? '=' : base64_digits[group >> (18 - 6 * k) & 63];
    }
    return text;
}

/// Returns nothing for what is no base64 with padding.
inline std::optional<std::string> from_base64(std::string_view text) {
    if (text.size() % 4 != 0) return std::nullopt;
    std::string bytes;
    bytes.reserve(text.size() / 4 * 3);
    const std::size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
    for (std::size_t i = 0; i < text.size(); i += 4) {
        unsigned group = 0;
        for (std::size_t k = i; k < i + 4; ++k) {
            const std::size_t value = k + padding < text.size() ? base64_digits.find(text[k]) : 0;
            if (value == std::string_view::npos) return std::nullopt;
            group = group << 6 | static_cast<unsigned>(value);
        }
        for (unsigned shift : {16u, 8u, 0u}) bytes += static_cast<char>(group >> shift & 255);
    }
    bytes.resize(bytes.size() - padding);
    return bytes;
}

/// The parts of an answer that this library uses.
struct Answer {
    struct Entry {
        std::string key = {}, value = {};
    };
    bool succeeded = false;           ///< the condition of the transaction was met
    std::vector<Entry> entries = {};  ///< of a range
    std::string token = {};           ///< of a user
    std::string error = {};           ///< why there is none of these
};

/// Reads JSON of any shape, and keeps what an Answer holds.
class AnswerReader {
public:
    explicit AnswerReader(std::string_view json) noexcept : json_(json) {}

    /// Returns nothing for what is no JSON, and for keys and values that are no base64.
    std::optional<Answer> read() {
        if (!value({}, 0)) return std::nullopt;
        skip_blanks();
        return at_ == json_.size() ? std::optional(std::move(answer_)) : std::nullopt;
    }

private:
    static constexpr int max_depth = 16;

    bool value(std::string_view name, int depth) {
        skip_blanks();
        if (depth == max_depth || at_ == json_.size()) return false;
        if (json_[at_] == '"') {
            std::string text;
            return string(text) && take(name, std::move(text));
        }
        if (json_[at_] == '{')
            return list('}', [&] {
                std::string member;
                if (!string(member)) return false;
                skip_blanks();
                return next(':') && value(member, depth + 1);
            });
        if (json_[at_] != '[') return word(name);
        return list(']', [&] {
            if (name == "kvs") answer_.entries.emplace_back();
            return value({}, depth + 1);
        });
    }
    /// Reads `{` or `[`, elements with a comma between them, and the end.
    template <class F>
    bool list(char end, F&& element) {
        ++at_;
        skip_blanks();
        if (next(end)) return true;
        do {
            skip_blanks();
            if (!element()) return false;
            skip_blanks();
        } while (next(','));
        return next(end);
    }
    bool string(std::string& text) {
        if (!next('"')) return false;
        while (at_ < json_.size() && json_[at_] != '"') {
            char c = json_[at_++];
            if (static_cast<unsigned char>(c) < ' ') return false;
            if (c == '\\') {
                if (at_ == json_.size()) return false;
                c = json_[at_++];
                const bool is_plain = c == '"' || c == '\\' || c == '/';
                if (c == 'u') {
                    if (json_.size() - at_ < 4) return false;
                    at_ += 4;
                } else if (!is_plain && std::string_view("bfnrt").find(c) == std::string_view::npos) {
                    return false;
                }
                if (!is_plain) c = '?';  // in none of the texts that count
            }
            text += c;
        }
        return next('"');
    }
    /// true, false, null or a number
    bool word(std::string_view name) {
        const std::size_t begin = at_;
        while (at_ < json_.size() && std::string_view(",]} \t\r\n").find(json_[at_]) == std::string_view::npos) ++at_;
        const std::string_view all = json_.substr(begin, at_ - begin);
        if (name == "succeeded") answer_.succeeded = all == "true";
        return all == "true" || all == "false" || all == "null" ||
               (!all.empty() && all.find_first_not_of("0123456789+-.eE") == std::string_view::npos);
    }
    bool take(std::string_view name, std::string text) {
        const bool is_key = name == "key";
        if (!answer_.entries.empty() && (is_key || name == "value")) {
            auto bytes = from_base64(text);
            if (bytes) (is_key ? answer_.entries.back().key : answer_.entries.back().value) = std::move(*bytes);
            return bytes.has_value();
        }
        if (name == "token") answer_.token = std::move(text);
        if (name == "error") answer_.error = std::move(text);
        return true;
    }
    void skip_blanks() noexcept {
        while (at_ < json_.size() && std::string_view(" \t\r\n").find(json_[at_]) != std::string_view::npos) ++at_;
    }
    bool next(char c) noexcept {
        const bool is_next = at_ < json_.size() && json_[at_] == c;
        at_ += is_next;
        return is_next;
    }

    std::string_view json_;
    std::size_t at_ = 0;
    Answer answer_;
};

}  // namespace gradsync::inline v0_2::etcd

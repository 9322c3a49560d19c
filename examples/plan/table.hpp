// SPDX-License-Identifier: BSL-1.0
#pragma once
// Tables for people.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

namespace gradsync_plan {

/// A title, perhaps a header, and rows. The first column is text, the others are numbers.
struct Table {
    std::string title;
    std::vector<std::string> header;
    std::vector<std::vector<std::string>> rows;
    std::vector<std::string> notes = {};

    void print(std::FILE* out) const {
        std::fprintf(out, "%s\n", title.c_str());
        std::vector<std::size_t> widths;
        const auto measure = [&](const std::vector<std::string>& row) {
            if (widths.size() < row.size()) widths.resize(row.size());
            for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
        };
        measure(header);
        for (const auto& row : rows) measure(row);
        const auto line = [&](const std::vector<std::string>& row) {
            for (std::size_t i = 0; i < row.size(); ++i)
                std::fprintf(out, i == 0 ? "  %-*s" : "  %*s", static_cast<int>(widths[i]), row[i].c_str());
            std::fputc('\n', out);
        };
        if (!header.empty()) line(header);
        for (const auto& row : rows) line(row);
        for (const std::string& note : notes) std::fprintf(out, "%s\n", note.c_str());
        std::fputc('\n', out);
    }
};

/// 1234567 -> "1,234,567"
inline std::string grouped(std::uint64_t n) {
    std::string text = std::to_string(n);
    for (std::size_t i = text.size(); i > 3; i -= 3) text.insert(i - 3, 1, ',');
    return text;
}

/// With so many significant digits: 3.90625, 0.00123.
inline std::string digits(double x, int significant = 6) {
    char text[48];
    std::snprintf(text, sizeof text, "%.*g", significant, x);
    return text;
}

/// 879394553856 -> "819 GiB"
inline std::string binary_bytes(std::uint64_t n) {
    constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double x = static_cast<double>(n);
    std::size_t unit = 0;
    while (x >= 1024 && unit + 1 < std::size(units)) x /= 1024, ++unit;
    return digits(x, 6) + " " + units[unit];
}

}  // namespace gradsync_plan

// SPDX-License-Identifier: BSL-1.0
#pragma once
// Charts, drawn by gnuplot.

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gradsync_plan {

struct Curve {
    std::string name;
    std::vector<std::pair<double, double>> points;
};

struct Chart {
    std::string title, x, y;
    bool log_x = false, log_y = false;
    std::vector<Curve> curves = {};
};

/// Writes an SVG file. Throws std::runtime_error where gnuplot is not there, or cannot do it.
inline void draw(const Chart& chart, const std::filesystem::path& file) {
    const auto quoted = [](const std::string& text) {  // in gnuplot's single quotes
        std::string result = "'";
        for (const char c : text) (result += c) += c == '\'' ? "'" : "";
        return result + "'";
    };
    std::string script =
        "set terminal svg size 860,520 dynamic enhanced font 'Helvetica,14' background '#ffffff'\n"
        "set output " +
        quoted(file.string()) +
        "\n"
        "set title " +
        quoted(chart.title) + " noenhanced\nset xlabel " + quoted(chart.x) + "\nset ylabel " + quoted(chart.y) +
        "\n"
        "set border 3 lc '#404040'\nset tics nomirror out\nset grid lc '#d8d8d8' lt 1\nset key outside right center noenhanced samplen 2\n";
    if (chart.log_x) script += "set logscale x 2\nset format x '%.0f'\n";
    if (chart.log_y) script += "set logscale y\n";
    else script += "set yrange [0:*]\n";
    // Colours that are told apart in shades of grey, and by those who see few of them.
    constexpr const char* colours[] = {"#999999", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00", "#cc79a7", "#000000"};
    std::string plots;
    for (std::size_t i = 0; i < chart.curves.size(); ++i) {
        const std::string name = "$curve" + std::to_string(i);
        script += name + " << EOD\n";
        for (const auto& [x, y] : chart.curves[i].points) script += std::to_string(x) + " " + std::to_string(y) + "\n";
        script += "EOD\n";
        plots += (i == 0 ? "plot " : ", ") + name + " using 1:2 with linespoints lw 2 ps 0.6 pt 7 lc '" + colours[i % std::size(colours)] +
                 "' title " + quoted(chart.curves[i].name);
    }
    script += plots + "\nset output\n";

    const auto failed = [&](const char* why) { throw std::runtime_error("--plot: " + file.string() + " was not drawn: " + why); };
    if (std::system("command -v gnuplot >/dev/null 2>&1") != 0) failed("gnuplot is missing; install it (apt-get install gnuplot-nox)");
    std::FILE* const gnuplot = ::popen("gnuplot", "w");
    if (gnuplot == nullptr) failed("gnuplot could not be started");
    const bool written = std::fputs(script.c_str(), gnuplot) >= 0;
    if (::pclose(gnuplot) != 0 || !written) failed("gnuplot refused it (see above); is the folder there, and may it be written?");
}

}  // namespace gradsync_plan

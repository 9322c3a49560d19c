// SPDX-License-Identifier: BSL-1.0
#pragma once

// Durations and clocks. libstdc++'s <chrono> brings calendars and <sstream> along, a third of this library's
// compile time; its own headers use this part of it alone.
#if defined(__GLIBCXX__) || __has_include(<bits/chrono.h>)
#include <bits/chrono.h>
#else
#include <chrono>
#endif

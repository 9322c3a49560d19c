// SPDX-License-Identifier: BSL-1.0
#pragma once

#if !(__cplusplus >= 202002L || (defined(_MSVC_LANG) && _MSVC_LANG >= 202002L))
#error "gradsync: compile as C++20 or later (-std=c++20, target_compile_features(... cxx_std_20))"
#endif
#if !defined(__linux__) || !defined(__LP64__)
#error "gradsync: compile for 64-bit Linux; other systems are not supported"
#endif

/// @file
/// The umbrella header: vocabulary types, engine, policies and the in-process backend.
/// Other backends have headers of their own.

#include "average.hpp"
#include "backend/thread_backend.hpp"
#include "bucket/any_buckets.hpp"
#include "bucket/flat.hpp"
#include "bucket/per_parameter.hpp"
#include "core/packed.hpp"
#include "core/version.hpp"
#include "overlap/any_overlap.hpp"
#include "overlap/no_overlap.hpp"
#include "reducer.hpp"

#ifdef GRADSYNC_COMPILED
#include "compiled.hpp"
#endif

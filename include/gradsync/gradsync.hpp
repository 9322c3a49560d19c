#pragma once

/// The umbrella: vocabulary, engine, policies, in-process backend. Other backends have headers of their own.

#include "backend/run_threads.hpp"
#include "backend/thread_backend.hpp"
#include "bucket/flat.hpp"
#include "bucket/per_parameter.hpp"
#include "bucket/size_capped.hpp"
#include "core/backend.hpp"
#include "core/bucket_plan.hpp"
#include "core/buffer_view.hpp"
#include "core/dtype.hpp"
#include "core/error.hpp"
#include "core/overlap_policy.hpp"
#include "core/parameter.hpp"
#include "core/reduce_op.hpp"
#include "core/shard_range.hpp"
#include "core/version.hpp"
#include "observe/statistics.hpp"
#include "overlap/no_overlap.hpp"
#include "overlap/overlap_backward.hpp"
#include "overlap/overlap_backward_thread.hpp"
#include "reducer.hpp"

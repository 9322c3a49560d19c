// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// Run-time choice of the vector instruction set. Users need no compiler flag.
///
/// A kernel is a type with one static function `run(args...)`, marked `GRADSYNC_ALWAYS_INLINE` and written with plain
/// loops or the compiler's vector types. `dispatch<Kernel>(args...)` runs the copy compiled for the widest instruction
/// set of this processor. Functions that `run` calls on elements must be always-inline too: a function that is not
/// inlined keeps the baseline's instructions. AVX-512 brings fused multiply-add, which compilers use for `a + b * c` in
/// one expression. Keep products and sums of floats in separate loops, or the bits differ by processor.
///
/// Some functions in other headers are `template <class = void>`: they take long to compile, and only files that call
/// them compile them.

#include "../core/always_inline.hpp"

#if defined(__x86_64__) && !defined(__CUDA_ARCH__)
#include <cpuid.h>
#define GRADSYNC_X86_DISPATCH 1
#else
#define GRADSYNC_X86_DISPATCH 0
#endif

namespace gradsync::inline v0_2::kernel {

enum class Isa { baseline, avx2, avx512 };  // avx2 with F16C, avx512 with F, BW, VL and DQ

/// The widest instruction set that both the processor and the operating system support.
inline Isa isa() noexcept {
#if GRADSYNC_X86_DISPATCH
    static const Isa best = [] {
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            return Isa::avx512;
        unsigned eax, ebx, ecx, edx;  // not all compilers know F16C by name
        const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
        return f16c && __builtin_cpu_supports("avx2") ? Isa::avx2 : Isa::baseline;
    }();
    return best;
#else
    return Isa::baseline;
#endif
}

template <class Kernel, class... Args>
void run_baseline(Args... args) {
    Kernel::run(args...);
}

// g++ clears the upper halves of vector registers at -O2 only. Left as they are, they slow down
// the caller's SSE instructions.
#if GRADSYNC_X86_DISPATCH
template <class Kernel, class... Args>
[[gnu::target("avx2,f16c")]] void run_avx2(Args... args) {
    Kernel::run(args...);
    __builtin_ia32_vzeroupper();
}

template <class Kernel, class... Args>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512dq")]] void run_avx512(Args... args) {
    Kernel::run(args...);
    __builtin_ia32_vzeroupper();
}
#endif

/// `dispatch` for kernels written with vector types: runs `Kernel::With<bytes>`, where
/// `bytes` is the size of a register.
template <class Kernel, class... Args>
void dispatch_vectors(Args... args) {
#if GRADSYNC_X86_DISPATCH
    switch (isa()) {
        case Isa::avx512: return run_avx512<typename Kernel::template With<64>>(args...);
        case Isa::avx2: return run_avx2<typename Kernel::template With<32>>(args...);
        case Isa::baseline: break;
    }
#endif
    run_baseline<typename Kernel::template With<16>>(args...);
}

template <class Kernel>
struct AnyRegister {
    template <int>
    using With = Kernel;
};

template <class Kernel, class... Args>
void dispatch(Args... args) {
    dispatch_vectors<AnyRegister<Kernel>>(args...);
}

}  // namespace gradsync::inline v0_2::kernel

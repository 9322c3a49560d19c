// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass a mutable range
// expect 2: gradsync: evaluate this Eigen expression into a matrix first
// expect 3: gradsync: use float, double, Eigen::half
// expect 4: gradsync: return or pass a reference to this tensor
#include <complex>

#include <gradsync/interop/eigen.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using Eigen::MatrixXf;

void f(MatrixXf& m) {
#if GRADSYNC_EXPECT_FAILURE == 1
    const MatrixXf& gradient = m;
    (void)gradsync::buffer(gradient);
#elif GRADSYNC_EXPECT_FAILURE == 2
    (void)gradsync::buffer(m + m);
#elif GRADSYNC_EXPECT_FAILURE == 3
    Eigen::MatrixXcf gradient = m.cast<std::complex<float>>();
    (void)gradsync::buffer(gradient);
#elif GRADSYNC_EXPECT_FAILURE == 4
    (void)gradsync::buffer(MatrixXf(m));
#else
    const MatrixXf sum = m + m;
    (void)gradsync::const_buffer(sum);
    (void)gradsync::buffer(m);
#endif
}

// SPDX-License-Identifier: BSL-1.0
// A program that links gradsync::cxx14, whose language standard stays what the compiler or the project says.
#include <gradsync/cxx14.hpp>

#if __cplusplus >= 202002L
#error "gradsync::cxx14 raises the language standard of programs that link it"
#endif

int main() {
    gradsync::cxx14::Communicator comm = gradsync::cxx14::Communicator::from_environment();
    float weight = 1, gradient = 2;
    gradsync::cxx14::Reducer sync(comm, {gradsync::cxx14::parameter("w", &weight, &gradient, 1)});
    sync.broadcast_parameters();
    sync.mark_ready(0);
    sync.finish();
    comm.average(&weight, 1);
    return weight == 1 && gradient == 2 && comm.size() == 1 ? 0 : 1;
}

#include <gradsync/gradsync.hpp>

#include <stdexcept>
#include <vector>

float second_unit();

int main() {
    gradsync::run_threads(2, [](gradsync::ThreadBackend comm) {
        std::vector<float> x{1.f};
        comm.all_reduce(gradsync::buffer(x), gradsync::ReduceOp::sum).wait();
        if (x[0] != second_unit()) throw std::runtime_error("1 + 1 is not 2");
    });
}

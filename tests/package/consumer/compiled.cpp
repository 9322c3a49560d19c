// SPDX-License-Identifier: BSL-1.0
// A program that links gradsync::compiled, with a Reducer whose policies and elements are not those that it holds, and with a rank of
// TcpBackend.
#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>

#include <vector>

#ifndef GRADSYNC_COMPILED
#error "gradsync::compiled does not say that it is there"
#endif

int main() {
    const auto means = gradsync::run_threads(2, [](gradsync::ThreadBackend comm) {
        std::vector<float> single{static_cast<float>(comm.rank())};
        std::vector<double> wide{static_cast<double>(comm.rank())};
        gradsync::Reducer sync(comm, std::vector{std::span(single)});
        gradsync::Reducer other(comm, std::vector{std::span(wide)}, gradsync::Flat{}, gradsync::NoOverlap{});
        sync.mark_ready(0);
        other.mark_ready(0);
        sync.finish();
        other.finish();
        return single[0] + wide[0];
    });
    gradsync::TcpRendezvous alone(gradsync::Job{});
    gradsync::TcpBackend comm(alone);
    std::vector<float> third{2};
    gradsync::Reducer over_tcp(comm, std::vector{std::span(third)});
    over_tcp.mark_ready(0);
    over_tcp.finish();
    return means[0] == 1 && means[1] == 1 && third[0] == 2 ? 0 : 1;
}

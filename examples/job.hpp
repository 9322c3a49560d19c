// SPDX-License-Identifier: BSL-1.0
#pragma once
// What surrounds the training, whichever backend the ranks use: what is read before, and what is said at the end.

#include <cstdio>
#include <memory>
#include <string>
#include <type_traits>

#include "checkpoint.hpp"
#include "data.hpp"
#include "options.hpp"
#include "report.hpp"
#include "safetensors.hpp"
#include "synchroniser.hpp"

namespace gradsync_train {

/// The state of a process. It stays when the other ranks change.
struct Outliving {
    std::shared_ptr<void> arrays;  // of its synchroniser
    Progress progress;
};

/// All that the ranks of this process need, complete and checked.
struct Job {
    Options options;
    std::FILE* out;  // for people; standard output is for one reader at a time, a program or a person
    Reading reading;
    Text text;
    std::unique_ptr<Checkpoint const> checkpoint;  // to go on from; or none
    std::unique_ptr<SafeWeights const> weights;    // to begin with; or none
    MakeKeeper make_keeper;                        // or none
    Elastic* elastic = nullptr;                    // if ranks come and go
    Outliving* outliving = nullptr;                // the same
};

/// Reads what the flags name. Throws UsageError. One process of several says what there is to say: `speaks`.
Job prepare(Options options, bool speaks = true);

/// The table, the JSON object and the sample.
void present(const Job& job, const Results& results);

/// The end of a program or of a rank that could not go on; or that was only asked for help.
struct Ending {
    int code;
    std::string text;  // a sentence if code > 0

    void print() const;
};

/// Of the exception that is being handled.
Ending ending_of_current_exception();

/// Runs the rest of the program; returns the exit code (what `f` returns, if anything), having said what there is to say.
template <class F>
int exit_code_of(F&& f) {
    try {
        if constexpr (!std::is_void_v<decltype(f())>) return f();
        f();
        return 0;
    } catch (...) {
        const Ending ending = ending_of_current_exception();
        ending.print();
        return ending.code;
    }
}

/// The rest of the program where `--backend mpi` is given: this process is one of mpirun's. Returns the exit code. Not linked into every
/// program.
[[gnu::weak]] int main_over_mpi(int argc, char** argv);

/// The same for `--backend tcp`: this process is one of a launcher's. Not linked into every program.
[[gnu::weak]] int main_over_tcp(int argc, char** argv);

/// The same for `--device cuda --backend nccl`. Not linked into every program.
[[gnu::weak]] int main_over_nccl(int argc, char** argv);

/// `--device cuda` with ranks that are threads. Not linked into every program.
[[gnu::weak]] void train_on_devices(const Job& job);

}  // namespace gradsync_train

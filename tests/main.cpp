// SPDX-License-Identifier: BSL-1.0
// The main function of every test program: doctest's, with two additions. A program that ran no test case fails,
// and one that hangs says in which test case before ctest kills it.

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

namespace {

const doctest::TestCaseData* volatile running = nullptr;
unsigned selected = 0;

struct Monitor final : doctest::IReporter {
    explicit Monitor(const doctest::ContextOptions&) {}
    void report_query(const doctest::QueryData&) override { selected = 1; }  // --list-test-cases and the like
    void test_run_start() override {}
    void test_run_end(const doctest::TestRunStats& stats) override { selected = stats.numTestCasesPassingFilters; }
    void test_case_start(const doctest::TestCaseData& test) override { running = &test; }
    void test_case_reenter(const doctest::TestCaseData&) override {}
    void test_case_end(const doctest::CurrentTestCaseStats&) override { running = nullptr; }
    void test_case_exception(const doctest::TestCaseException&) override {}
    void subcase_start(const doctest::SubcaseSignature&) override {}
    void subcase_end() override {}
    void log_assert(const doctest::AssertData&) override {}
    void log_message(const doctest::MessageData&) override {}
    void test_case_skipped(const doctest::TestCaseData&) override {}
};

REGISTER_LISTENER("monitor", 0, Monitor);

// Only what is safe in a signal handler.
void print(const char* text) { [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, std::strlen(text)); }

extern "C" void on_time_limit(int) {
    print("\nTIME LIMIT reached in test case \"");
    if (const doctest::TestCaseData* test = running) {
        print(test->m_name);
        print("\" of ");
        print(test->m_file.c_str());
    } else {
        print("(none)\"");
    }
    print("\n");
    ::_exit(124);
}

}  // namespace

// A program may have something to do before anything else: -1 to go on, or what to exit with.
int prepare_tests() __attribute__((weak));

int main(int argc, char** argv) {
    if (&prepare_tests != nullptr)
        if (const int code = prepare_tests(); code >= 0) return code;
    if (const char* seconds = std::getenv("GRADSYNC_TEST_TIMEOUT")) {
        std::signal(SIGALRM, on_time_limit);
        ::alarm(static_cast<unsigned>(std::atoi(seconds)));
    }
    doctest::Context context(argc, argv);
    const int result = context.run();
    if (selected == 0) {
        std::fputs("no test case was selected\n", stderr);
        return 1;
    }
    return result;
}

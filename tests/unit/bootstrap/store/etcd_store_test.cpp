// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync::etcd NOT_WITH thread COST 20
// An EtcdStore keeps its promises when members of etcd die, answers are lost or wrong, and etcd asks for a user. The conformance suite tests the
// rest.
#include <gradsync/bootstrap/store/etcd_store.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/elastic/records.hpp>

#include "support/etcd.hpp"
#include "support/says.hpp"
#include "support/temporary_directory.hpp"

using namespace std::chrono_literals;
using gradsync::AnyStore;
using gradsync::Blob;
using gradsync::Errc;
using gradsync::Error;
using gradsync::EtcdOptions;
using gradsync::EtcdStore;
using gradsync_test::Etcd;
using gradsync_test::FakeServer;
using gradsync_test::is_missing;
using gradsync_test::post;
using gradsync_test::says;

namespace {

std::span<const std::byte> bytes(const std::string& text) { return std::as_bytes(std::span(text)); }
template <class S>
std::string create(S& store, const std::string& name, const std::string& text) {
    return std::string(gradsync::bootstrap::text_of(store.create(name, bytes(text))));
}

/// What `f` throws.
template <class F>
Error thrown(F&& f) {
    try {
        f();
    } catch (const Error& error) {
        return error;
    }
    return Error(Errc::peer_failed, "nothing was thrown");
}
Error thrown_at(const std::string& address, const EtcdOptions& options = {}) {
    return thrown([&] { (void)EtcdStore(address, options).read("name"); });
}

/// Threads that create the same names, each with bytes of its own, until `stop()`.
class Race {
public:
    explicit Race(const std::string& address, std::size_t threads = 4) : got_(threads), counts_(threads) {
        for (std::size_t t = 0; t < threads; ++t) threads_.emplace_back([this, t, address] { run(t, address); });
    }
    /// How many names each thread has created, at least.
    std::size_t names() const { return *std::min_element(counts_.begin(), counts_.end()); }
    void await(std::size_t more) const {
        for (const std::size_t before = names(); names() < before + more;) std::this_thread::sleep_for(1ms);
    }
    void stop() {
        stops_ = true;
        for (std::thread& thread : threads_) thread.join();
        const std::size_t common = names();
        for (auto& got : got_) {
            CHECK(says(got.back(), "writer "));  // not an error
            got.resize(common);
            CHECK(got == got_[0]);
        }
    }
    const std::vector<std::string>& winners() const { return got_[0]; }

private:
    void run(std::size_t t, const std::string& address) try {
        EtcdStore store(address, {.timeout = 120s});
        const std::string own = "writer " + std::to_string(gradsync::bootstrap::random_token());
        while (!stops_) {
            got_[t].push_back(create(store, "race/" + std::to_string(got_[t].size()), own));
            ++counts_[t];
        }
    } catch (const std::exception& error) {
        got_[t].push_back(error.what());
        counts_[t] = 1'000'000;  // nobody waits for it
    }

    std::vector<std::vector<std::string>> got_;
    std::vector<std::atomic<std::size_t>> counts_;
    std::atomic<bool> stops_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace

TEST_CASE("EtcdStore: an address that is wrong is refused, and a password in it is not repeated") {
    const auto refused = [](const std::string& address, const std::string& words) {
        const Error error = thrown([&] { (void)AnyStore::open(address); });
        CHECK(error.errc() == Errc::invalid_argument);
        CHECK(says(error.what(), words));
    };
    refused("etcd://user:secret@host/job", "it holds a password");
    CHECK(std::string(thrown_at("etcd://user:secret@host/job").what()).find("secret") == std::string::npos);
    refused("etcd://user@host/job", "there is no password for the user");
    refused("etcd://host:2379", "no prefix");
    refused("etcds://host:2379//", "no prefix");
    for (const char* const address : {"etcd:///job", "etcd://a,,b/job", "etcd://:1/job", "etcd://a,/job"})
        refused(address, "write it as etcd://");
    for (const char* const address : {"etcd://a:x/job", "etcd://a b/job"}) CHECK(thrown_at(address).errc() == Errc::invalid_argument);
    refused("redis://a/job", "no store of the kind redis://");
    for (const char* const address : {"etcd://a,b:1,[::1]:2,[::1]/job/a/", "etcds://a/b"}) CHECK_NOTHROW((void)AnyStore::open(address));
}

TEST_CASE("EtcdStore: where nobody answers, the error names all members, after the time limit") {
    const auto nobody = std::to_string(gradsync_test::free_port()),
               silent = std::to_string(FakeServer([](const std::string&) { return ""; }).port());
    const Error error = thrown_at("etcd://127.0.0.1:" + nobody + ",127.0.0.1:" + silent + "/job", {.timeout = 300ms});
    CHECK(error.errc() == Errc::storage);
    CHECK(says(error.what(), "did not answer within 0.3 s: 127.0.0.1:" + nobody + ": "));
    CHECK(says(error.what(), "; 127.0.0.1:" + silent + ": "));
}

TEST_CASE("EtcdStore: no answer is trusted") {
    std::string body, status = "200 OK";
    const FakeServer server([&](const std::string&) { return FakeServer::http(body, status); });
    const auto fails = [&](const std::string& answer, const std::string& words) {
        body = answer;
        const Error error = thrown_at(server.address("/job"), {.timeout = 1s});
        CHECK(error.errc() == (status[0] == '4' ? Errc::invalid_argument : Errc::storage));
        CHECK(says(error.what(), words));
    };
    fails("", "none of etcd's");
    fails("{\"kvs\":[{\"key\":\"L2pvYi9uYW1l\",\"value\":\"x\"}]}", "none of etcd's");
    fails("{\"kvs\":[{\"key\":\"L2pvYi9vdGhlcg==\",\"value\":\"\"}]}", "something else than name");
    fails("{\"kvs\":[{\"key\":\"L2pvYi9uYW1l\"},{\"key\":\"L2pvYi9uYW1l\"}]}", "something else than name");
    fails("{\"kvs\":[{\"key\":\"L2pvYi9uYW1l\",\"value\":\"" + gradsync::etcd::to_base64(std::string(gradsync::largest_blob + 1, 'x')) +
              "\"}]}",
          "something else");
    body.assign((std::size_t{16} << 20) + 1, ' ');
    CHECK(says(thrown_at(server.address("/job")).what(), "too long"));
    body = "{\"kvs\":[{\"key\":\"L2pvYi9uYW1l\",\"value\":\"aGVsbG8=\"}]}";
    CHECK(EtcdStore(server.address("/job")).read("name")->size() == 5);
    CHECK(says(thrown([&] { (void)EtcdStore(server.address("/job")).names("other"); }).what(), "nobody has asked for"));
    body = "{}";
    CHECK(says(thrown([&] { (void)EtcdStore(server.address("/job")).create("name", {}); }).what(), "neither put nor found"));
    status = "503 Service Unavailable";
    fails("{\"error\":\"etcdserver: no leader\"}", "HTTP status 503, etcdserver: no leader");
    status = "404 Not Found";
    fails("a\x1b[2J\npage", "HTTP status 404, a?[2J; there is no etcd 3.4 or later");
}

TEST_CASE("EtcdStore: create() says who has won, however many answers are lost") {
    if (is_missing("etcd")) return;
    const Etcd etcd;
    std::mutex mutex;
    unsigned requests = 0;
    const auto forward = [&](const std::string& request) {
        const std::size_t end = request.find("\r\n") + 2;
        const std::string answer =
            gradsync_test::converse(etcd.port(), request.substr(0, end) + "Connection: close\r\n" + request.substr(end));
        const std::scoped_lock lock(mutex);
        return ++requests % 3 == 0 ? answer : answer.substr(0, requests % 3 == 1 ? 0 : answer.size() - 2);
    };
    (void)EtcdStore(etcd.address("/job")).read("name");  // once it is there
    const FakeServer losing(forward), another(forward);
    Race one(losing.address("/job"), 1), other(another.address("/job"), 1);
    while (one.names() < 12 || other.names() < 12) std::this_thread::sleep_for(1ms);
    one.stop();
    other.stop();
    EtcdStore store(etcd.address("/job"));
    for (std::size_t i = 0; i < 12; ++i) {
        const std::string winner = create(store, "race/" + std::to_string(i), "late");
        CHECK(winner == one.winners()[i]);
        CHECK(winner == other.winners()[i]);
    }
    CHECK(requests >= 60);
}

TEST_CASE("EtcdStore: a leader that is killed, and one that is stopped, delay calls and change nothing") {
    if (is_missing("etcd")) return;
    Etcd etcd(3);
    Race race(etcd.address("/job"));
    race.await(30);
    for (const int signal : {SIGKILL, SIGSTOP}) {
        const std::size_t leader = etcd.leader();
        if (signal == SIGKILL) etcd.kill(leader);
        else etcd.send(leader, SIGSTOP);
        race.await(30);
        if (signal == SIGKILL) etcd.start(leader);
        else etcd.send(leader, SIGCONT);
        race.await(30);
    }
    race.stop();
    REQUIRE(race.winners().size() >= 150);
    EtcdStore store(etcd.address("/job"));
    for (std::size_t i = 0; i < race.winners().size(); ++i) CHECK(create(store, "race/" + std::to_string(i), "late") == race.winners()[i]);
}

TEST_CASE("EtcdStore: users, passwords, and tokens that etcd has forgotten") {
    if (is_missing("etcd")) return;
    Etcd etcd;
    const std::string address = etcd.address("/job");
    CHECK_NOTHROW((void)EtcdStore(address, {.user = "anybody", .password = "x"}).read("name"));  // nobody is asked yet
    for (const auto& [path, body] : std::vector<std::pair<std::string, std::string>>{
             {"user/add", R"({"name":"root","password":"r"})"},
             {"user/grant", R"({"user":"root","role":"root"})"},
             {"user/add", R"({"name":"me","password":"\"p\\"})"},
             {"role/add", R"({"name":"job"})"},
             {"role/grant", R"({"name":"job","perm":{"permType":"READWRITE","key":")" + gradsync::etcd::to_base64("/job/") +
                                R"(","range_end":")" + gradsync::etcd::to_base64("/job0") + R"("}})"},
             {"user/grant", R"({"user":"me","role":"job"})"},
             {"enable", "{}"}})
        REQUIRE(says(post(etcd.port(), "/v3/auth/" + path, body), "200 OK"));
    const auto refused = [&](const std::string& at, const EtcdOptions& options, const std::string& words) {
        const Error error = thrown_at(at, options);
        CHECK(error.errc() == Errc::invalid_argument);
        CHECK(says(error.what(), words));
    };
    const EtcdOptions mine{.user = "me", .password = "\"p\\"};
    refused(address, {}, "set ETCDCTL_USER and ETCDCTL_PASSWORD");
    refused(address, {.user = "me", .password = "other"}, "authentication failed");
    refused(etcd.address("/jobs"), mine, "permission denied");
    EtcdStore store(address, mine);
    CHECK(create(store, "name", "1") == "1");
    CHECK(store.names("").size() == 1);
    etcd.kill(0);
    etcd.start(0);
    CHECK(create(store, "name", "2") == "1");

    const gradsync_test::TemporaryDirectory folder;
    std::ofstream(folder.file("password")) << "\"p\\\n";
    ::setenv("GRADSYNC_ETCD_PASSWORD_FILE", folder.file("password").c_str(), 1);
    const auto other = AnyStore::open("etcd://me@" + address.substr(7));
    CHECK(create(*other, "name", "3") == "1");
    const std::string token(3000, 'x');  // JSON Web Tokens are long
    std::ofstream(folder.file("long")) << token << "\r\nmore\n";
    ::setenv("GRADSYNC_ETCD_PASSWORD_FILE", folder.file("long").c_str(), 1);
    CHECK(EtcdOptions::from_environment().password == token);
    ::setenv("GRADSYNC_ETCD_PASSWORD_FILE", folder.file("absent").c_str(), 1);
    CHECK(says(thrown([&] { (void)AnyStore::open(address); }).what(), "absent of GRADSYNC_ETCD_PASSWORD_FILE cannot be read"));
    ::unsetenv("GRADSYNC_ETCD_PASSWORD_FILE");
}

TEST_CASE("EtcdStore: TLS, with a certificate of the client") {
    if (is_missing("etcd") || is_missing("openssl")) return;
    const gradsync_test::TemporaryDirectory folder;
    const std::string certificate = folder.file("certificate"), key = folder.file("key");
    const pid_t maker =
        gradsync_test::start_program({"openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=me",
                                      "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate},
                                     folder.file("log"));
    ::waitpid(maker, nullptr, 0);
    const Etcd etcd(1, {"--cert-file", certificate, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", certificate}, "https");
    const EtcdOptions mine{.ca = certificate, .certificate = certificate, .key = key};
    EtcdStore store(etcd.address("/job"), mine);
    CHECK(create(store, "name", "1") == "1");
    CHECK(says(thrown_at(etcd.address("/job"), {.certificate = certificate, .key = key}).what(), "certificate"));
    CHECK(thrown_at(etcd.address("/job"), {.timeout = 300ms, .ca = certificate}).errc() == Errc::storage);
}

TEST_CASE("Records opens a store in etcd once more for another thread") {
    if (is_missing("etcd")) return;
    const Etcd etcd;
    gradsync::elastic::Records records(etcd.address("/job"), gradsync::elastic::Machine(1, 1, true));
    std::thread([&] {
        gradsync::elastic::Records other = records.another();
        CHECK(create(other.store(), "end", "why") == "why");
    }).join();
    records.refresh();
    REQUIRE(records.end());
    CHECK(gradsync::bootstrap::text_of(*records.end()) == "why");
}

TEST_CASE("EtcdStore: a member that hangs up on an old token, or is too busy to answer, is asked again; no limit is too long") {
    std::string valid = "first";
    int calls = 0;
    const FakeServer server([&](const std::string& request) -> std::string {
        const auto has = [&](const std::string& words) { return request.find(words) != std::string::npos; };
        if (has("/v3/auth/authenticate")) return FakeServer::http("{\"token\":\"" + valid + "\"}");
        if (!has("Authorization: " + valid)) return "";
        if (++calls == 1) return FakeServer::http("{\"error\":\"context canceled\"}", "499 Client Closed Request");
        return FakeServer::http("{}");
    });
    EtcdStore store(server.address("/job"), {.timeout = 5s, .user = "me", .password = "x"});
    CHECK(!store.read("name"));
    valid = "second";
    CHECK(!store.read("name"));
    CHECK(!EtcdStore(server.address("/job"), {.timeout = std::chrono::nanoseconds::max(), .user = "me", .password = "x"}).read("name"));
}

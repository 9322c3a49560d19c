// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <signal.h>

#include <curl/curl.h>

#include "../../core/open_file.hpp"
#include "../../core/unique_handle.hpp"
#include "any_store.hpp"
#include "etcd_answer.hpp"

namespace gradsync::inline v0_2 {

/// How an EtcdStore reaches etcd.
struct EtcdOptions {
    std::chrono::nanoseconds timeout = std::chrono::seconds(30);  ///< of each call
    std::string user = {};                                        ///< none if etcd asks for none
    std::string password = {};                                    ///< of the user
    std::string ca = {};           ///< for TLS: a file of authorities, in PEM; by default the system's
    std::string certificate = {};  ///< of this client: a file, in PEM
    std::string key = {};          ///< of the certificate: a file, in PEM

    /// Reads what etcdctl reads: ETCDCTL_USER, ETCDCTL_PASSWORD, ETCDCTL_CACERT, ETCDCTL_CERT and ETCDCTL_KEY. Without
    /// ETCDCTL_PASSWORD the password is the first line of the file that GRADSYNC_ETCD_PASSWORD_FILE names.
    static EtcdOptions from_environment();
};

/// A Store in etcd 3.4 or later, under keys that begin with a prefix. Its address is
/// `etcd://host1:2379,host2:2379,host3:2379/prefix`, or `etcds://` for TLS; a `user@` may stand before the hosts.
/// Programs that include this header also open it where the library takes the address of a store, and link
/// gradsync::etcd.
///
/// Any member will do, and a call tries all of them, again and again, until its time limit. A name is put by a
/// transaction that asks whether it is absent, and else reads it. So it does not matter if an answer is lost: the next
/// one says what is there. Names have no leases. Functions also throw Error(invalid_argument) if etcd refuses a
/// request, as with a wrong password. Do not use a store in a process that was forked from its own.
class EtcdStore {
    using Clock = std::chrono::steady_clock;

public:
    /// Connects with nobody yet. Throws Error(invalid_argument) for an invalid address, and for one with a password.
    explicit EtcdStore(std::string_view address, EtcdOptions options = EtcdOptions::from_environment())
        : options_(std::move(options)) {
        static const CURLcode started = curl_global_init(CURL_GLOBAL_DEFAULT);
        if (started == CURLE_OK) curl_ = UniqueHandle<CURL*, curl_easy_cleanup>(curl_easy_init());
        if (!curl_) bootstrap::raise(Errc::storage, {.operation = "store"}, "libcurl cannot be started");
        (void)set_timeout(options_.timeout);
        read_address(address);
    }

    /// See the concept `Store`.
    Blob create(std::string_view name, std::span<const std::byte> bytes) {
        bootstrap::check_entry(name, bytes.size(), "create");
        const std::string key = etcd::to_base64(prefix_ + std::string(name)),
                          value = etcd::to_base64(bootstrap::text_of(bytes));
        const etcd::Answer answer =
            ask("/v3/kv/txn",
                bootstrap::text(R"({"compare":[{"target":"CREATE","result":"EQUAL","create_revision":"0","key":")", key,
                                R"("}],"success":[{"request_put":{"key":")", key, R"(","value":")", value,
                                R"("}}],"failure":[{"request_range":{"key":")", key, R"("}}]})"));
        if (answer.succeeded) return Blob(bytes.begin(), bytes.end());
        if (auto there = blob_in(answer, name)) return *std::move(there);
        fail("holds invalid data", "a transaction neither put nor found a name");
    }
    /// See the concept `Store`.
    std::optional<Blob> read(std::string_view name) {
        bootstrap::check_entry(name, 0, "read");
        const std::string key = prefix_ + std::string(name);
        return blob_in(ask("/v3/kv/range", bootstrap::text(R"({"key":")", etcd::to_base64(key), R"("})")), name);
    }
    /// See the concept `Store`.
    std::vector<std::string> names(std::string_view prefix) {
        const std::string begin = prefix_ + std::string(prefix);
        std::string end = begin;
        ++end.back();
        const etcd::Answer answer =
            ask("/v3/kv/range", bootstrap::text(R"({"keys_only":true,"key":")", etcd::to_base64(begin),
                                                R"(","range_end":")", etcd::to_base64(end), R"("})"));
        std::vector<std::string> found;
        for (const etcd::Answer::Entry& entry : answer.entries) {
            if (!entry.key.starts_with(begin)) fail("holds invalid data", "it lists a name that nobody has asked for");
            found.push_back(entry.key.substr(prefix_.size()));
        }
        detail::sort_by(found, [](const std::string& one, const std::string& other) { return one < other; });
        return found;
    }

    /// Changes the time limit of each call. Returns the one of before.
    std::chrono::nanoseconds set_timeout(std::chrono::nanoseconds limit) noexcept {
        return std::exchange(options_.timeout, detail::clamp_timeout(limit));
    }

private:
    static constexpr std::size_t largest_answer = std::size_t{16} << 20;

    struct Reply {
        std::optional<etcd::Answer> answer = {};
        std::string trouble = {};          ///< why there is none
        std::optional<Errc> refusal = {};  ///< another try would end in the same way
        bool hung_up = false;              ///< etcd has, without an answer
    };

    void read_address(std::string_view address) {
        const bool is_secure = address.starts_with("etcds://");
        const std::string_view scheme = is_secure ? "etcds://" : "etcd://";
        if (!address.starts_with(scheme)) refuse("it begins with neither etcd:// nor etcds://");
        address.remove_prefix(scheme.size());
        if (const std::size_t at = address.rfind('@'); at != std::string_view::npos) {
            if (address.substr(0, at).find(':') != std::string_view::npos)
                refuse(
                    "it holds a password, which others can see; set ETCDCTL_PASSWORD or GRADSYNC_ETCD_PASSWORD_FILE");
            options_.user = address.substr(0, at);
            address.remove_prefix(at + 1);
        }
        name_ = bootstrap::text(scheme, address);
        const std::string_view hosts = address.substr(0, address.find('/'));
        address.remove_prefix(hosts.size());
        while (address.ends_with('/')) address.remove_suffix(1);
        if (address.empty()) refuse("it has no prefix of this job's own; write one after the hosts, as in /job1");
        prefix_ = bootstrap::text(address, "/");
        for (std::size_t begin = 0; begin <= hosts.size();) {
            const std::size_t end = detail::smaller(hosts.find(',', begin), hosts.size());
            std::string host(hosts.substr(begin, end - begin));
            if (host.empty() || host[0] == ':') refuse("write it as etcd://host1:2379,host2:2379/prefix");
            if (host.find(':', host.rfind(']') + 1) == std::string::npos) host += ":2379";
            hosts_.push_back(std::move(host));
            begin = end + 1;
        }
        base_ = is_secure ? "https://" : "http://";
        if (!options_.user.empty() && options_.password.empty())
            refuse("there is no password for the user; set ETCDCTL_PASSWORD or GRADSYNC_ETCD_PASSWORD_FILE");
    }

    std::optional<Blob> blob_in(const etcd::Answer& answer, std::string_view name) const {
        if (answer.entries.empty()) return std::nullopt;
        const auto& [key, value] = answer.entries[0];
        if (answer.entries.size() != 1 || key != prefix_ + std::string(name) || value.size() > largest_blob)
            fail("holds invalid data", bootstrap::text("it answers something else than ", name));
        const auto bytes = std::as_bytes(std::span(value));
        return Blob(bytes.begin(), bytes.end());
    }

    /// Asks one member after the other, and gives each more time in each round.
    etcd::Answer ask(const char* path, const std::string& body) {
        const auto end = Clock::now() + options_.timeout;
        List<std::string> troubles(hosts_.size());
        auto limit = std::chrono::milliseconds(1000), pause = std::chrono::milliseconds(10);
        for (std::size_t tries = 1;; ++tries) {
            Reply reply = attempt(path, body, detail::smaller(end, Clock::now() + limit));
            if (reply.answer) return *std::move(reply.answer);
            if (reply.refusal)
                fail("cannot be used", bootstrap::text(hosts_[current_], ": ", reply.trouble), *reply.refusal);
            // An attempt that had no time left replaces no earlier trouble of its host.
            const bool is_cut = Clock::now() >= end && !troubles[current_].empty();
            if (!reply.trouble.empty() && !is_cut)
                troubles[current_] = bootstrap::text(hosts_[current_], ": ", reply.trouble);
            current_ = (current_ + 1) % hosts_.size();
            if (Clock::now() >= end) break;
            if (tries % hosts_.size() != 0) continue;
            ::usleep(static_cast<useconds_t>(pause.count() * 1000));
            pause = detail::smaller(2 * pause, std::chrono::milliseconds(250));
            limit = detail::smaller(2 * limit, std::chrono::milliseconds(60'000));
        }
        fail(bootstrap::text("did not answer within ", detail::format_duration(options_.timeout)),
             detail::joined(troubles, "; "));
    }
    /// Asks one member, as a user if there is one. A token may have become old: then once more with another one.
    Reply attempt(const char* path, const std::string& body, Clock::time_point end) {
        for (bool is_fresh = token_.empty();; is_fresh = true) {
            if (!options_.user.empty() && token_.empty()) {
                Reply reply = post("/v3/auth/authenticate",
                                   bootstrap::text(R"({"name":")", quoted(options_.user), R"(","password":")",
                                                   quoted(options_.password), R"("})"),
                                   end);
                if (reply.answer) token_ = reply.answer->token;
                else if (reply.trouble.find("authentication is not enabled") != std::string::npos)
                    options_.user.clear();
                else return reply;
            }
            Reply reply = post(path, body, end);
            if (is_fresh || reply.answer) return reply;
            if (reply.refusal || reply.hung_up) token_.clear();  // it may be an old one
            if (!reply.refusal) return reply;
        }
    }
    Reply post(const char* path, const std::string& body, Clock::time_point end) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
        if (left <= 0) return {};
        std::string answer;
        char problem[CURL_ERROR_SIZE] = "";
        UniqueHandle<curl_slist*, curl_slist_free_all> headers;
        const std::string authorization = "Authorization: " + token_;  // without a token libcurl leaves it out
        for (const char* const line : {"Content-Type: application/json", "Expect:", authorization.c_str()})
            headers = UniqueHandle<curl_slist*, curl_slist_free_all>(curl_slist_append(headers.release(), line));
        const std::string url = base_ + hosts_[current_] + path;
        const auto set = [&](CURLoption option, auto value) { curl_easy_setopt(curl_.get(), option, value); };
        curl_easy_reset(curl_.get());  // keeps connections
        set(CURLOPT_URL, url.c_str());
        set(CURLOPT_HTTPHEADER, headers.get());
        set(CURLOPT_POSTFIELDS, body.c_str());
        set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(body.size()));
        set(CURLOPT_TIMEOUT_MS, static_cast<long>(left));
        set(CURLOPT_NOSIGNAL, 1L);
        set(CURLOPT_PROXY, "");  // of http_proxy, which is for the world outside
        set(CURLOPT_ERRORBUFFER, static_cast<char*>(problem));
        set(CURLOPT_WRITEDATA, static_cast<void*>(&answer));
        set(
            CURLOPT_WRITEFUNCTION, +[](char* bytes, std::size_t, std::size_t count, void* text) {
                auto& all = *static_cast<std::string*>(text);
                if (all.size() + count > largest_answer) return std::size_t{0};
                all.append(bytes, count);
                return count;
            });
        set(
            CURLOPT_SOCKOPTFUNCTION, +[](void*, curl_socket_t socket, curlsocktype) {
                return ::fcntl(socket, F_SETFD, FD_CLOEXEC) == 0 ? CURL_SOCKOPT_OK : CURL_SOCKOPT_ERROR;
            });
        if (!options_.ca.empty()) set(CURLOPT_CAINFO, options_.ca.c_str());
        if (!options_.certificate.empty()) set(CURLOPT_SSLCERT, options_.certificate.c_str());
        if (!options_.key.empty()) set(CURLOPT_SSLKEY, options_.key.c_str());
        // OpenSSL sends this thread a signal if a connection breaks.
        sigset_t pipe, before;
        ::sigemptyset(&pipe);
        ::sigaddset(&pipe, SIGPIPE);
        ::pthread_sigmask(SIG_BLOCK, &pipe, &before);
        const CURLcode code = curl_easy_perform(curl_.get());
        const timespec at_once{};
        if (::sigismember(&before, SIGPIPE) == 0) ::sigtimedwait(&pipe, nullptr, &at_once);
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        if (code == CURLE_OK) return reply_in(answer);
        Reply reply{.trouble = *problem != '\0' ? problem : curl_easy_strerror(code)};
        reply.hung_up = code == CURLE_GOT_NOTHING || code == CURLE_RECV_ERROR || code == CURLE_SEND_ERROR;
        if (code == CURLE_WRITE_ERROR) {
            reply.trouble = "its answer is too long";
            reply.refusal = Errc::storage;
        } else if (code == CURLE_PEER_FAILED_VERIFICATION || code == CURLE_SSL_CACERT_BADFILE ||
                   code == CURLE_SSL_CERTPROBLEM || code == CURLE_URL_MALFORMAT) {
            reply.refusal = Errc::invalid_argument;
        }
        return reply;
    }
    Reply reply_in(const std::string& text) const {
        Reply reply;
        long status = 0;
        curl_easy_getinfo(curl_.get(), CURLINFO_RESPONSE_CODE, &status);
        auto answer = etcd::AnswerReader(text).read();
        if (status == 200 && answer) {
            reply.answer = std::move(answer);
            return reply;
        }
        if (status >= 400 && status < 500 && status != 408 && status != 429 && status != 499)  // slow, busy
            reply.refusal = Errc::invalid_argument;
        std::string said = answer && !answer->error.empty() ? answer->error : text;
        said.resize(detail::smaller(said.find('\n'), detail::smaller(said.size(), std::size_t{200})));
        for (char& c : said)
            if (c < ' ' || c > '~') c = '?';  // it may be printed on a terminal
        reply.trouble =
            status == 200 ? "its answer is none of etcd's" : bootstrap::text("HTTP status ", status, ", ", said);
        if (status == 404) reply.trouble += "; there is no etcd 3.4 or later";
        if (said.find("user name is empty") != std::string::npos)
            reply.trouble += "; set ETCDCTL_USER and ETCDCTL_PASSWORD";
        return reply;
    }

    static std::string quoted(std::string_view text) {
        std::string all;
        for (const char c : text) {
            if (c == '"' || c == '\\') all += '\\';
            all += c;
        }
        return all;
    }
    [[noreturn]] static void refuse(std::string_view why) {
        bootstrap::raise(Errc::invalid_argument, {.operation = "store"}, "the address of a store in etcd: ", why);
    }
    [[noreturn]] void fail(std::string_view what, std::string_view why, Errc code = Errc::storage) const {
        bootstrap::raise(code, {.operation = "store"}, "the store ", name_, " ", what, ": ", why);
    }

    EtcdOptions options_;
    std::string name_, base_, prefix_, token_;
    List<std::string> hosts_;
    std::size_t current_ = 0;  ///< of the hosts: the one that answers
    UniqueHandle<CURL*, curl_easy_cleanup> curl_;
};

static_assert(Store<EtcdStore>);

inline EtcdOptions EtcdOptions::from_environment() {
    const auto variable = [](const char* name) {
        const char* const value = std::getenv(name);
        return std::string(value == nullptr ? "" : value);
    };
    EtcdOptions options{.user = variable("ETCDCTL_USER"),
                        .password = variable("ETCDCTL_PASSWORD"),
                        .ca = variable("ETCDCTL_CACERT"),
                        .certificate = variable("ETCDCTL_CERT"),
                        .key = variable("ETCDCTL_KEY")};
    const std::string path = variable("GRADSYNC_ETCD_PASSWORD_FILE");
    if (path.empty() || !options.password.empty()) return options;
    std::FILE* const file = detail::open_file(path, O_RDONLY, "rb");
    const std::string problem = file == nullptr ? detail::open_problem() : "it is empty";
    int next = file == nullptr ? EOF : std::fgetc(file);
    const bool is_there = next != EOF;
    for (; next != EOF && next != '\n' && next != '\r'; next = std::fgetc(file))
        options.password += static_cast<char>(next);
    if (file != nullptr) std::fclose(file);
    if (!is_there)
        bootstrap::raise(Errc::invalid_argument, {.operation = "store"}, "the file ", path,
                         " of GRADSYNC_ETCD_PASSWORD_FILE cannot be read: ", problem);
    return options;
}

/// Internal: lets AnyStore::open take addresses of etcd.
inline const bool etcd_is_known = [] {
    AnyStore::open_etcd = [](const std::string& address) -> std::unique_ptr<AnyStore> {
        return std::make_unique<StoreAs<EtcdStore>>(address);
    };
    return true;
}();

}  // namespace gradsync::inline v0_2

// What the functions of the driver and of cuBLAS share: GPUs, streams and their work, memory, and checks of how they are called.
#pragma once

#include <cuda.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace fake {

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

// A misuse that CUDA does not answer with an error.
[[noreturn]] inline __attribute__((format(printf, 1, 2))) void misuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "the driver of the emulator: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    abort();
}

inline uint64_t number(const char* variable, uint64_t otherwise) {
    const char* text = getenv(variable);
    return text == nullptr || *text == 0 ? otherwise : strtoull(text, nullptr, 10);
}

constexpr uint64_t CONTEXT_BYTES = 512 << 20;
constexpr uint32_t SHARED_WITHOUT_ASKING = 48 << 10;
constexpr size_t PAGE = 4096;

struct Event {
    bool timed = true;
    struct Stream* stream = nullptr;
    // The record's place among the stream's work; 0: never recorded.
    uint64_t place = 0;
    // The captured stream that it was recorded in; then it only orders the work of that capture.
    struct Stream* captured_in = nullptr;
    Clock::time_point reached;
};

struct Capture {
    std::thread::id thread;
    std::shared_ptr<std::vector<Work>> work = std::make_shared<std::vector<Work>>();
};

struct Stream {
    std::recursive_mutex running;
    std::deque<Work> work;
    uint64_t asked = 0, done = 0;
    std::unique_ptr<Capture> capture;
};

struct Pool {
    uint64_t used = 0, reserved = 0;
};

// A GPU: its primary context is its own address.
struct Gpu {
    Pool pool;
};

struct Kernel {
    std::string name;
    int32_t number;
    size_t param_bytes;
    uint32_t shared = SHARED_WITHOUT_ASKING;
    uint32_t registers = 0, static_shared = 0;
};

struct Module {
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
};

using Nodes = std::shared_ptr<std::vector<Work>>;

struct Driver {
    std::mutex lock;
    std::vector<Gpu> gpus{size_t(number("RLOOD_FAKE_CUDA_GPUS", 1))};
    uint64_t bytes = number("RLOOD_FAKE_CUDA_BYTES", uint64_t(16) << 30);
    uint32_t shared = uint32_t(number("RLOOD_FAKE_CUDA_SHARED", 227 << 10));
    bool eager = number("RLOOD_FAKE_CUDA_EAGER", 0) != 0;
    // Device memory and pinned memory: where it begins, how long it is.
    std::map<uint64_t, uint64_t> device, pinned;
    std::set<void*> streams, events, modules, graphs, executables;
    std::atomic<bool> started{false};
    std::atomic<int> sticky{0};
    std::map<std::string, uint64_t> calls;
    // By kernel: registers of a thread, static shared memory of a block.
    std::map<std::string, std::pair<uint32_t, uint32_t>> told;

    Driver() {
        const char* log = getenv("RLOOD_FAKE_CUDA_LOG");
        if (log == nullptr) return;
        std::ifstream file(log);
        if (!file) misuse("RLOOD_FAKE_CUDA_LOG=%s cannot be read", log);
        std::string line, name;
        while (std::getline(file, line)) {
            size_t at = line.find("Compiling entry function '");
            if (at != std::string::npos) {
                at += strlen("Compiling entry function '");
                name = line.substr(at, line.find('\'', at) - at);
            }
            at = line.find("Used ");
            if (at == std::string::npos || name.empty()) continue;
            auto& kernel = told[name];
            kernel.first = std::max(kernel.first, uint32_t(atoi(line.c_str() + at + 5)));
            size_t smem = line.find(" bytes smem");
            if (smem == std::string::npos) continue;
            size_t from = line.rfind(' ', smem - 1);
            kernel.second = std::max(kernel.second, uint32_t(atoi(line.c_str() + from + 1)));
        }
        if (told.empty()) misuse("RLOOD_FAKE_CUDA_LOG=%s tells no kernel's registers", log);
    }
};

inline Driver& driver() {
    // Lives on: threads may call while the process ends.
    static Driver& one = *new Driver;
    return one;
}

inline thread_local Gpu* current = nullptr;
// The capture that this thread began, under which it may call little.
inline thread_local Stream* capturing = nullptr;
// Another stream whose work is a part of that capture.
inline thread_local Stream* joined = nullptr;
// The captured stream, if this stream's work is a part of a capture.
inline Stream* captured_by(Stream* stream) {
    return capturing != nullptr && (stream == capturing || stream == joined) ? capturing : nullptr;
}

// Counts a call, and tells the error that it is to answer with.
inline CUresult called(const char* name) {
    Driver& d = driver();
    if (int error = d.sticky) return CUresult(error);
    static const char* wish = getenv("RLOOD_FAKE_CUDA_FAIL");
    if (wish == nullptr) return CUDA_SUCCESS;
    std::lock_guard<std::mutex> guard(d.lock);
    uint64_t count = ++d.calls[name];
    size_t length = strlen(name);
    if (strncmp(wish, name, length) != 0 || wish[length] != ':') return CUDA_SUCCESS;
    char* rest = nullptr;
    if (strtoull(wish + length + 1, &rest, 10) != count) return CUDA_SUCCESS;
    int error = atoi(rest + 1);
    if (error >= 700 && error < 800) d.sticky = error;
    return CUresult(error);
}

#define CALLED()                                                                                                       \
    do {                                                                                                               \
        CUresult answer = called(__func__);                                                                            \
        if (answer != CUDA_SUCCESS) return answer;                                                                     \
        if (!driver().started) return CUDA_ERROR_NOT_INITIALIZED;                                                      \
    } while (0)
#define IN_CONTEXT()                                                                                                   \
    do {                                                                                                               \
        CALLED();                                                                                                      \
        if (current == nullptr) return CUDA_ERROR_INVALID_CONTEXT;                                                     \
    } while (0)
// What must not be called while this thread captures a stream.
#define NOT_CAPTURING()                                                                                                \
    do {                                                                                                               \
        if (capturing != nullptr) misuse("%s while a stream is captured", __func__);                                   \
    } while (0)

template <typename T> void known(std::set<void*>& all, T* handle, const char* what) {
    std::lock_guard<std::mutex> guard(driver().lock);
    if (all.count(handle) == 0) misuse("%s that there is not (any more)", what);
}
template <typename T> void add(std::set<void*>& all, T* handle) {
    std::lock_guard<std::mutex> guard(driver().lock);
    all.insert(handle);
}
template <typename T> void forget(std::set<void*>& all, T* handle, const char* what) {
    std::lock_guard<std::mutex> guard(driver().lock);
    if (all.erase(handle) == 0) misuse("%s destroyed twice, or never made", what);
}

inline Stream* of(CUstream handle) {
    auto stream = reinterpret_cast<Stream*>(handle);
    known(driver().streams, stream, "a stream");
    return stream;
}
inline Event* of(CUevent handle) {
    auto event = reinterpret_cast<Event*>(handle);
    known(driver().events, event, "an event");
    return event;
}

// Whether a range lies in one of these.
inline bool lies_in(const std::map<uint64_t, uint64_t>& all, uint64_t from, uint64_t bytes) {
    std::lock_guard<std::mutex> guard(driver().lock);
    auto next = all.upper_bound(from);
    if (next == all.begin()) return false;
    --next;
    return from + bytes <= next->first + next->second;
}
inline void on_device(const char* what, uint64_t from, uint64_t bytes) {
    if (!lies_in(driver().device, from, bytes)) misuse("%s: %zu bytes at %zx are not in device memory", what, size_t(bytes), size_t(from));
}
inline void on_host(const char* what, const void* from, uint64_t bytes) {
    if (!lies_in(driver().pinned, uint64_t(from), bytes))
        misuse("%s: %zu bytes at %p are not in pinned memory", what, size_t(bytes), from);
}

// Carry out a stream's work up to a place.
inline void run(Stream* stream, uint64_t place) {
    std::lock_guard<std::recursive_mutex> guard(stream->running);
    while (stream->done < place && !stream->work.empty()) {
        Work work = std::move(stream->work.front());
        stream->work.pop_front();
        // After an error nothing is carried out any more.
        if (driver().sticky == 0) work();
        stream->done++;
    }
}

inline CUresult ask(Stream* stream, Work work) {
    if (stream == joined) stream = capturing;
    if (stream->capture) {
        if (stream->capture->thread != std::this_thread::get_id()) misuse("work from another thread for a stream that is captured");
        stream->capture->work->push_back(std::move(work));
        return CUDA_SUCCESS;
    }
    std::lock_guard<std::recursive_mutex> guard(stream->running);
    stream->work.push_back(std::move(work));
    stream->asked++;
    if (driver().eager) run(stream, stream->asked);
    return CUresult(int(driver().sticky));
}

}  // namespace fake

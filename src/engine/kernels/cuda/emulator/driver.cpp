// NVIDIA's driver and cuBLAS, as far as ../nvidia.rs calls them, over the emulator: a library that takes the place of
// libcuda.so.1 and libcublas.so (tests/cuda/driver.sh builds it, against NVIDIA's own header), so that everything
// but the GPU itself runs as it does on one. For tests.
//
// A stream's work waits until somebody waits for it, as late as a GPU could be: what reads or overwrites memory too early
// shows. RLOOD_FAKE_CUDA_EAGER=1 carries it out at once. What CUDA forbids, or leaves undefined, ends the process
// with a message; what it answers with an error is answered so. Further variables:
//   RLOOD_FAKE_CUDA_BYTES=N        memory of a GPU (16 GiB), of which the context takes half a GiB
//   RLOOD_FAKE_CUDA_GPUS=N         how many GPUs (1)
//   RLOOD_FAKE_CUDA_VERSION=N      the CUDA that the driver supports, 1000 major + 10 minor
//   RLOOD_FAKE_CUDA_SHARED=N       bytes of shared memory that a block may have (227 KiB)
//   RLOOD_FAKE_CUDA_FAIL=NAME:N:E  the Nth call of a function answers with the error E; of the 700s all later calls too
//   RLOOD_FAKE_CUDA_LOG=FILE       what ptxas --verbose said of the kernels: launches are held to their registers
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

extern "C" {
int32_t rlood_emulator_find(const char* name, size_t name_bytes, size_t* param_bytes);
const char* rlood_emulator_launch(int32_t kernel, const void* params, const uint32_t* grid, uint32_t block,
                                  uint32_t shared, uint32_t most_shared);
}

namespace {

using Work = std::function<void()>;
using Clock = std::chrono::steady_clock;

// A misuse that CUDA does not answer with an error.
[[noreturn]] __attribute__((format(printf, 1, 2))) void misuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "the driver of the emulator: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    abort();
}

uint64_t number(const char* variable, uint64_t otherwise) {
    const char* text = getenv(variable);
    return text == nullptr || *text == 0 ? otherwise : strtoull(text, nullptr, 10);
}

constexpr uint64_t CONTEXT_BYTES = 512 << 20;
constexpr uint32_t REGISTERS = 65536;
constexpr uint32_t SHARED_WITHOUT_ASKING = 48 << 10;
constexpr size_t PAGE = 4096;

struct Event {
    bool timed = true;
    bool destroyed = false;
    struct Stream* stream = nullptr;
    // The record's place among the stream's work; 0: never recorded.
    uint64_t place = 0;
    Clock::time_point reached;
};

struct Capture {
    std::thread::id thread;
    CUstreamCaptureMode mode;
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
    bool opened = false;
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

Driver& driver() {
    // Lives on: threads may call while the process ends.
    static Driver& one = *new Driver;
    return one;
}

thread_local Gpu* current = nullptr;
// The capture that this thread began, under which it may call little.
thread_local Stream* capturing = nullptr;

// Counts a call, and tells the error that it is to answer with.
CUresult called(const char* name) {
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

Stream* of(CUstream handle) {
    auto stream = reinterpret_cast<Stream*>(handle);
    known(driver().streams, stream, "a stream");
    return stream;
}
Event* of(CUevent handle) {
    auto event = reinterpret_cast<Event*>(handle);
    known(driver().events, event, "an event");
    return event;
}

// Whether a range lies in one of these.
bool lies_in(const std::map<uint64_t, uint64_t>& all, uint64_t from, uint64_t bytes) {
    std::lock_guard<std::mutex> guard(driver().lock);
    auto next = all.upper_bound(from);
    if (next == all.begin()) return false;
    --next;
    return from + bytes <= next->first + next->second;
}
void on_device(const char* what, uint64_t from, uint64_t bytes) {
    if (!lies_in(driver().device, from, bytes)) misuse("%s: %zu bytes at %zx are not in device memory", what, size_t(bytes), size_t(from));
}
void on_host(const char* what, const void* from, uint64_t bytes) {
    if (!lies_in(driver().pinned, uint64_t(from), bytes))
        misuse("%s: %zu bytes at %p are not in pinned memory", what, size_t(bytes), from);
}

// Carry out a stream's work up to a place.
void run(Stream* stream, uint64_t place) {
    std::lock_guard<std::recursive_mutex> guard(stream->running);
    while (stream->done < place && !stream->work.empty()) {
        Work work = std::move(stream->work.front());
        stream->work.pop_front();
        // After an error nothing is carried out any more.
        if (driver().sticky == 0) work();
        stream->done++;
    }
}

CUresult ask(Stream* stream, Work work) {
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

CUresult launch(Kernel* kernel, const uint32_t grid[3], uint32_t block, uint32_t shared, CUstream handle, const void* params) {
    Driver& d = driver();
    Stream* stream = of(handle);
    if (shared > kernel->shared || kernel->static_shared + shared > d.shared) return CUDA_ERROR_INVALID_VALUE;
    if (block == 0 || block > 1024 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0 || grid[0] > 0x7fffffffu ||
        grid[1] > 65535 || grid[2] > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    // A warp takes registers by 256.
    uint32_t of_warp = (kernel->registers * 32 + 255) / 256 * 256;
    if ((block + 31) / 32 * of_warp > REGISTERS) {
        fprintf(stderr, "the driver of the emulator: %s: %u threads of %u registers\n", kernel->name.c_str(), block, kernel->registers);
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    }
    auto copy = std::make_shared<std::vector<unsigned char>>(kernel->param_bytes + 16);
    size_t offset = (16 - reinterpret_cast<uintptr_t>(copy->data()) % 16) % 16;
    memcpy(copy->data() + offset, params, kernel->param_bytes);
    uint32_t x = grid[0], y = grid[1], z = grid[2], most = d.shared;
    return ask(stream, [=] {
        uint32_t blocks[3] = {x, y, z};
        const char* message = rlood_emulator_launch(kernel->number, copy->data() + offset, blocks, block, shared, most);
        if (message == nullptr) return;
        fprintf(stderr, "the driver of the emulator: %s: %s\n", kernel->name.c_str(), message);
        driver().sticky = CUDA_ERROR_ILLEGAL_ADDRESS;
    });
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned int flags) {
    driver().started = true;
    if (driver().gpus.empty()) return CUDA_ERROR_NO_DEVICE;
    CUresult answer = called(__func__);
    return answer != CUDA_SUCCESS ? answer : flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDriverGetVersion(int* version) {
    *version = int(number("RLOOD_FAKE_CUDA_VERSION", CUDA_VERSION));
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "error %d", int(error));
    *name = text;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

CUresult cuDeviceGetCount(int* count) {
    CALLED();
    *count = int(driver().gpus.size());
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    CALLED();
    if (ordinal < 0 || size_t(ordinal) >= driver().gpus.size()) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int bytes, CUdevice device) {
    CALLED();
    snprintf(name, size_t(bytes), "emulator %d behind a driver", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    CALLED();
    switch (attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 4; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = int(driver().shared); return CUDA_SUCCESS;
        default: misuse("the attribute %d is not known here", int(attribute));
    }
}

CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) {
    CALLED();
    *bytes = driver().bytes;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    CALLED();
    NOT_CAPTURING();
    Gpu& gpu = driver().gpus.at(size_t(device));
    gpu.opened = true;
    *context = reinterpret_cast<CUcontext>(&gpu);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    CALLED();
    current = reinterpret_cast<Gpu*>(context);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t* free, size_t* total) {
    IN_CONTEXT();
    std::lock_guard<std::mutex> guard(driver().lock);
    *total = driver().bytes;
    *free = driver().bytes - CONTEXT_BYTES - current->pool.reserved;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned int) {
    IN_CONTEXT();
    NOT_CAPTURING();
    auto made = new Stream;
    add(driver().streams, made);
    *stream = reinterpret_cast<CUstream>(made);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    IN_CONTEXT();
    NOT_CAPTURING();
    Stream* stream = of(handle);
    run(stream, stream->asked);
    return CUresult(int(driver().sticky));
}

CUresult cuStreamDestroy(CUstream handle) {
    IN_CONTEXT();
    NOT_CAPTURING();
    Stream* stream = of(handle);
    run(stream, stream->asked);
    // Stays for events that were recorded in it.
    forget(driver().streams, stream, "a stream");
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode mode) {
    IN_CONTEXT();
    Stream* stream = of(handle);
    if (stream->capture || capturing != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
    stream->capture = std::make_unique<Capture>();
    stream->capture->thread = std::this_thread::get_id();
    stream->capture->mode = mode;
    capturing = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    IN_CONTEXT();
    Stream* stream = of(handle);
    if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture->thread != std::this_thread::get_id()) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    auto made = new Nodes(stream->capture->work);
    add(driver().graphs, made);
    *graph = reinterpret_cast<CUgraph>(made);
    stream->capture.reset();
    capturing = nullptr;
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph, unsigned long long) {
    IN_CONTEXT();
    NOT_CAPTURING();
    auto nodes = reinterpret_cast<Nodes*>(graph);
    known(driver().graphs, nodes, "a graph");
    auto made = new Nodes(*nodes);
    add(driver().executables, made);
    *executable = reinterpret_cast<CUgraphExec>(made);
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph) {
    auto nodes = reinterpret_cast<Nodes*>(graph);
    forget(driver().graphs, nodes, "a graph");
    delete nodes;
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec executable, CUstream stream) {
    IN_CONTEXT();
    known(driver().executables, executable, "an executable graph");
    of(stream);
    return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream handle) {
    IN_CONTEXT();
    NOT_CAPTURING();
    auto nodes = reinterpret_cast<Nodes*>(executable);
    known(driver().executables, nodes, "an executable graph");
    return ask(of(handle), [work = *nodes] {
        for (const Work& node : *work)
            if (driver().sticky == 0) node();
    });
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
    auto nodes = reinterpret_cast<Nodes*>(executable);
    forget(driver().executables, nodes, "an executable graph");
    delete nodes;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* pool, CUdevice device) {
    CALLED();
    *pool = reinterpret_cast<CUmemoryPool>(&driver().gpus.at(size_t(device)).pool);
    return CUDA_SUCCESS;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool, CUmemPool_attribute attribute, void* value) {
    CALLED();
    if (attribute != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD || *static_cast<uint64_t*>(value) != UINT64_MAX)
        misuse("a pool is expected to keep everything");
    return CUDA_SUCCESS;
}

CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep) {
    CALLED();
    NOT_CAPTURING();
    if (keep != 0) misuse("a pool is expected to give everything back");
    std::lock_guard<std::mutex> guard(driver().lock);
    auto own = reinterpret_cast<Pool*>(pool);
    own->reserved = own->used;
    return CUDA_SUCCESS;
}

CUresult cuMemAllocAsync(CUdeviceptr* start, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    NOT_CAPTURING();
    of(stream);
    Driver& d = driver();
    std::lock_guard<std::mutex> guard(d.lock);
    Pool& pool = current->pool;
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (pool.used + bytes > d.bytes - CONTEXT_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t room = (bytes + PAGE - 1) / PAGE * PAGE;
    // A page on each side that nothing may touch.
    void* memory = mmap(nullptr, room + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    auto first = static_cast<char*>(memory) + PAGE;
    mprotect(first, room, PROT_READ | PROT_WRITE);
    memset(first, 0xff, room);
    pool.used += bytes;
    pool.reserved = std::max(pool.reserved, pool.used);
    *start = reinterpret_cast<CUdeviceptr>(first);
    d.device[*start] = bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeAsync(CUdeviceptr start, CUstream stream) {
    IN_CONTEXT();
    NOT_CAPTURING();
    Pool& pool = current->pool;
    return ask(of(stream), [start, &pool] {
        Driver& d = driver();
        std::lock_guard<std::mutex> guard(d.lock);
        auto found = d.device.find(start);
        if (found == d.device.end()) misuse("device memory that was freed twice, or never allocated");
        pool.used -= found->second;
        munmap(reinterpret_cast<char*>(start) - PAGE, (found->second + PAGE - 1) / PAGE * PAGE + 2 * PAGE);
        d.device.erase(found);
    });
}

CUresult cuMemHostAlloc(void** start, size_t bytes, unsigned int) {
    IN_CONTEXT();
    NOT_CAPTURING();
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    *start = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
    memset(*start, 0xff, bytes);
    std::lock_guard<std::mutex> guard(driver().lock);
    driver().pinned[uint64_t(*start)] = bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* start) {
    IN_CONTEXT();
    NOT_CAPTURING();
    std::lock_guard<std::mutex> guard(driver().lock);
    auto found = driver().pinned.find(uint64_t(start));
    if (found == driver().pinned.end()) misuse("pinned memory that was freed twice, or never allocated");
    memset(start, 0xff, found->second);
    driver().pinned.erase(found);
    free(start);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    on_host("a copy to the device", from, bytes);
    on_device("a copy to the device", to, bytes);
    return ask(of(stream), [=] {
        on_host("a copy to the device", from, bytes);
        on_device("a copy to the device", to, bytes);
        memcpy(reinterpret_cast<void*>(to), from, bytes);
    });
}

CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    on_host("a copy from the device", to, bytes);
    on_device("a copy from the device", from, bytes);
    // What it holds until then is neither the old nor the new.
    if (capturing == nullptr) memset(to, 0xff, bytes);
    return ask(of(stream), [=] {
        on_host("a copy from the device", to, bytes);
        on_device("a copy from the device", from, bytes);
        memcpy(to, reinterpret_cast<const void*>(from), bytes);
    });
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    return ask(of(stream), [=] {
        on_device("a copy on the device", from, bytes);
        on_device("a copy on the device", to, bytes);
        memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    });
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream) {
    IN_CONTEXT();
    return ask(of(stream), [=] {
        on_device("filling", to, bytes);
        memset(reinterpret_cast<void*>(to), value, bytes);
    });
}

CUresult cuEventCreate(CUevent* event, unsigned int flags) {
    IN_CONTEXT();
    NOT_CAPTURING();
    auto made = new Event;
    made->timed = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    add(driver().events, made);
    *event = reinterpret_cast<CUevent>(made);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
    IN_CONTEXT();
    NOT_CAPTURING();
    Event* event = of(handle);
    Stream* stream = of(stream_handle);
    std::lock_guard<std::recursive_mutex> guard(stream->running);
    event->stream = stream;
    event->place = stream->asked + 1;
    return ask(stream, [event] { event->reached = Clock::now(); });
}

CUresult cuEventSynchronize(CUevent handle) {
    IN_CONTEXT();
    NOT_CAPTURING();
    Event* event = of(handle);
    if (event->place != 0) run(event->stream, event->place);
    return CUresult(int(driver().sticky));
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent from_handle, CUevent to_handle) {
    IN_CONTEXT();
    Event *from = of(from_handle), *to = of(to_handle);
    if (!from->timed || !to->timed || from->place == 0 || to->place == 0) return CUDA_ERROR_INVALID_HANDLE;
    if (from->stream->done < from->place || to->stream->done < to->place) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(to->reached - from->reached).count();
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    IN_CONTEXT();
    NOT_CAPTURING();
    // Stays for records that have not been carried out.
    forget(driver().events, event, "an event");
    return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int, CUjit_option*, void**) {
    IN_CONTEXT();
    NOT_CAPTURING();
    // A fat binary of nvcc's.
    uint32_t magic;
    memcpy(&magic, image, 4);
    if (magic != 0xba55ed50) return CUDA_ERROR_INVALID_IMAGE;
    auto made = new Module;
    add(driver().modules, made);
    *module = reinterpret_cast<CUmodule>(made);
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    IN_CONTEXT();
    NOT_CAPTURING();
    auto own = reinterpret_cast<Module*>(module);
    forget(driver().modules, own, "a module");
    delete own;
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    IN_CONTEXT();
    // The code is loaded only now, which may synchronise.
    NOT_CAPTURING();
    auto own = reinterpret_cast<Module*>(module);
    known(driver().modules, own, "a module");
    auto& kernel = own->kernels[name];
    if (!kernel) {
        size_t param_bytes = 0;
        int32_t found = rlood_emulator_find(name, strlen(name), &param_bytes);
        auto& told = driver().told;
        if (found < 0) return CUDA_ERROR_NOT_FOUND;
        kernel = std::make_unique<Kernel>();
        kernel->name = name;
        kernel->number = found;
        kernel->param_bytes = param_bytes;
        auto compiled = told.find(name);
        if (compiled != told.end()) {
            kernel->registers = compiled->second.first;
            kernel->static_shared = compiled->second.second;
        } else if (!told.empty()) {
            misuse("%s is not among the kernels that nvcc compiled", name);
        }
    }
    *function = reinterpret_cast<CUfunction>(kernel.get());
    return CUDA_SUCCESS;
}

CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* bytes) {
    CALLED();
    if (index != 0) return CUDA_ERROR_INVALID_VALUE;
    *offset = 0;
    *bytes = reinterpret_cast<Kernel*>(function)->param_bytes;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
    IN_CONTEXT();
    auto kernel = reinterpret_cast<Kernel*>(function);
    if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) misuse("another attribute of a kernel: %d", int(attribute));
    if (value < 0 || uint32_t(value) + kernel->static_shared > driver().shared) return CUDA_ERROR_INVALID_VALUE;
    kernel->shared = uint32_t(value);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
                        CUstream stream, void** params, void**) {
    IN_CONTEXT();
    if (block_y != 1 || block_z != 1) misuse("the emulator's blocks have one dimension");
    uint32_t grid[3] = {grid_x, grid_y, grid_z};
    return launch(reinterpret_cast<Kernel*>(function), grid, block_x, shared, stream, params[0]);
}

// cuBLAS, by its documentation: https://docs.nvidia.com/cuda/cublas/

struct Blas {
    Stream* stream = nullptr;
    bool own_workspace = false;
};

enum : int { BLAS_OK = 0, BLAS_NOT_INITIALIZED = 1, BLAS_INVALID = 7, BLAS_FAILED = 13 };
enum : int { F32 = 0, BF16 = 14, COMPUTE_32F = 68 };

int cublasCreate_v2(Blas** handle) {
    if (current == nullptr) return BLAS_NOT_INITIALIZED;
    NOT_CAPTURING();
    *handle = new Blas;
    return called(__func__) == CUDA_SUCCESS ? BLAS_OK : BLAS_NOT_INITIALIZED;
}

int cublasDestroy_v2(Blas* handle) {
    NOT_CAPTURING();
    delete handle;
    return BLAS_OK;
}

// Sets the workspace back to cuBLAS's own.
int cublasSetStream_v2(Blas* handle, CUstream stream) {
    handle->stream = of(stream);
    handle->own_workspace = false;
    return BLAS_OK;
}

int cublasSetMathMode(Blas*, int) { return BLAS_OK; }

int cublasSetWorkspace_v2(Blas* handle, void* workspace, size_t bytes) {
    if (uint64_t(workspace) % 256 != 0) return BLAS_INVALID;
    on_device("cuBLAS's workspace", uint64_t(workspace), bytes);
    handle->own_workspace = true;
    return BLAS_OK;
}

int cublasGemmEx(Blas* handle, int turn_a, int turn_b, int m, int n, int k, const void* alpha, const void* a, int type_a,
                 int lda, const void* b, int type_b, int ldb, const void* beta, void* c, int type_c, int ldc, int compute,
                 int) {
    CUresult answer = called(__func__);
    if (answer == CUDA_ERROR_OUT_OF_MEMORY) return 3;
    if (answer != CUDA_SUCCESS || current == nullptr || driver().sticky != 0) return BLAS_FAILED;
    if (!handle->own_workspace) misuse("cuBLAS without a workspace of a fixed address");
    bool known_types = type_a == type_b && (type_a == F32 || type_a == BF16) && (type_c == F32 || type_c == type_a);
    if (!known_types || compute != COMPUTE_32F) return 15;
    if (m < 0 || n < 0 || k < 0 || lda < std::max(1, turn_a ? k : m) || ldb < std::max(1, turn_b ? n : k) || ldc < std::max(1, m))
        return BLAS_INVALID;
    float factor = *static_cast<const float*>(alpha), kept = *static_cast<const float*>(beta);
    answer = ask(handle->stream, [=] {
        auto bytes = [](int type) { return size_t(type == F32 ? 4 : 2); };
        auto check = [&](const char* what, const void* at, int type, int rows, int columns, int stride) {
            if (rows > 0 && columns > 0) on_device(what, uint64_t(at), bytes(type) * (size_t(columns - 1) * size_t(stride) + size_t(rows)));
        };
        check("a matrix of a product", a, type_a, turn_a ? k : m, turn_a ? m : k, lda);
        check("a matrix of a product", b, type_b, turn_b ? n : k, turn_b ? k : n, ldb);
        check("a product", c, type_c, m, n, ldc);
        auto get = [](const void* at, int type, size_t place) {
            if (type == F32) return static_cast<const float*>(at)[place];
            uint32_t bits = uint32_t(static_cast<const uint16_t*>(at)[place]) << 16;
            float x;
            memcpy(&x, &bits, 4);
            return x;
        };
        std::vector<float> left(size_t(m) * size_t(k)), sums;
        for (int j = 0; j < k; j++)
            for (int i = 0; i < m; i++)
                left[size_t(j) * size_t(m) + size_t(i)] =
                    get(a, type_a, turn_a ? size_t(i) * size_t(lda) + size_t(j) : size_t(j) * size_t(lda) + size_t(i));
        for (int column = 0; column < n; column++) {
            sums.assign(size_t(m), 0.0f);
            for (int j = 0; j < k; j++) {
                float x = get(b, type_b, turn_b ? size_t(j) * size_t(ldb) + size_t(column) : size_t(column) * size_t(ldb) + size_t(j));
                const float* from = &left[size_t(j) * size_t(m)];
                for (int i = 0; i < m; i++) sums[size_t(i)] += from[i] * x;
            }
            for (int i = 0; i < m; i++) {
                size_t place = size_t(column) * size_t(ldc) + size_t(i);
                // With beta = 0 what was there is not read.
                float y = factor * sums[size_t(i)] + (kept == 0.0f ? 0.0f : kept * get(c, type_c, place));
                if (type_c == F32) {
                    static_cast<float*>(c)[place] = y;
                } else {
                    uint32_t bits;
                    memcpy(&bits, &y, 4);
                    bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
                    static_cast<uint16_t*>(c)[place] = is_nan ? 0x7fff : uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
                }
            }
        }
    });
    return answer == CUDA_SUCCESS ? BLAS_OK : BLAS_FAILED;
}

}

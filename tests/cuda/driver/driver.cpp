// NVIDIA's driver and cuBLAS, as far as crates/kernels/src/cuda/nvidia.rs calls them, over the emulator: a library that takes the place of
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
#include "state.h"

using namespace fake;

extern "C" {
int32_t rlood_emulator_find(const char* name, size_t name_bytes, size_t* param_bytes);
const char* rlood_emulator_launch(int32_t kernel, const void* params, const uint32_t* grid, uint32_t block,
                                  uint32_t shared, uint32_t most_shared);
}

namespace {

constexpr uint32_t REGISTERS = 65536;

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
    if (mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) misuse("a capture that other threads may break");
    stream->capture = std::make_unique<Capture>();
    stream->capture->thread = std::this_thread::get_id();
    capturing = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    IN_CONTEXT();
    Stream* stream = of(handle);
    if (!stream->capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture->thread != std::this_thread::get_id()) return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (joined != nullptr) misuse("a capture ends, and another stream's work in it was not waited for");
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
    Event* event = of(handle);
    Stream* stream = of(stream_handle);
    event->captured_in = captured_by(stream);
    if (event->captured_in != nullptr) return CUDA_SUCCESS;
    NOT_CAPTURING();
    std::lock_guard<std::recursive_mutex> guard(stream->running);
    event->stream = stream;
    event->place = stream->asked + 1;
    return ask(stream, [event] { event->reached = Clock::now(); });
}

// While a stream is captured, another joins the capture by waiting for an event of it, and leaves it when the captured
// stream waits for an event of that other one. What is captured runs in the order in which it was asked for.
CUresult cuStreamWaitEvent(CUstream stream_handle, CUevent handle, unsigned int flags) {
    IN_CONTEXT();
    Stream* stream = of(stream_handle);
    Event* event = of(handle);
    if (flags != 0) misuse("flags of a wait for an event: %u", flags);
    if (event->captured_in != nullptr) {
        if (capturing != event->captured_in) misuse("a wait for an event of another capture");
        if (stream == capturing) joined = nullptr;
        else joined = stream;
        return CUDA_SUCCESS;
    }
    NOT_CAPTURING();
    return ask(stream, [other = event->stream, place = event->place] {
        if (place != 0) run(other, place);
    });
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

// Kernels run one after the other here, whatever the attribute permits.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
    if (config->numAttrs > 1) misuse("%u attributes of a launch", config->numAttrs);
    if (config->numAttrs == 1 && config->attrs[0].id != CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
        misuse("another attribute of a launch: %d", int(config->attrs[0].id));
    }
    return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                          config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, params, extra);
}

}

// Finds unordered accesses of two threads to the same place, of which one is a write. Needs addr2line. Usage:
//
//   export RLOOD_EMULATOR_RACES=1 RLOOD_RACES_REPORT=$PWD/target/races.txt
//   cargo test --release --features cuda-emulator --lib cuda
//   RLOOD_TEST_BACKEND=cuda cargo test --release --features cuda-emulator --test it -- parity:: golden:: gpu
//
// Each process appends its findings, and how often each kernel was launched, to the report; without a report, findings
// go to the standard error output. Findings do not fail the tests. RLOOD_RACES_WITHOUT=<line> ignores the barriers and
// __syncwarp of that line, to check that the tests would reach a race there.
//
// The kernels (races_kernels.cpp) are compiled with -fsanitize=thread. The calls that it inserts before each access
// call this file instead of the sanitizer's library. A single thread of the process runs the threads of a launch, and a
// clock ticks at each barrier and collective. Each access is stored with its tick for every two bytes (single bytes
// separately). Comparing it with the last barrier of the block and the last __syncwarp of the warp shows whether it is
// ordered before the current access:
//
//   race        the accesses are not ordered. Only atomic operations on the same place order blocks of a launch
//   weak        accesses of two lanes of a warp, with only a shuffle, ballot, matrix load or product in between
//   same value  two unordered writes of the same value
//   copy        an access to the destination of a cp_async before its thread has waited for the copy
//   unwritten   a read of shared memory that the block has not written
//
// Not detected: order between blocks by atomics and fences (reported as race); reads of global memory that was never
// written; and the time of a copy's read of global memory, which counts as read when the copy starts.
#include "races.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace emulator::races {
namespace {

enum Kind : uint8_t { None, Read, Write, Atomic, Copy, Matrix };
enum Class : uint8_t { Race, Weak, SameValue, InFlight, Unwritten };
const char* const KINDS[] = {"nothing", "read", "write", "atomic", "cp_async", "ldmatrix"};
const char* const CLASSES[] = {"race", "weak", "same value", "copy", "unwritten"};

constexpr uint32_t WARP_LANES = 32;
// Stands for all lanes instead of one.
constexpr uint16_t WHOLE_WARP = 0x8000;
constexpr size_t PAGE_CELLS = 2048;
constexpr size_t PAGES_AT_HAND = 4096;
constexpr uint32_t LAST_TICK = 1u << 31;

struct Access {
    uint32_t tick, at;
    uint16_t thread;
    Kind kind;

    uint32_t warp() const { return (thread & ~WHOLE_WARP) / WARP_LANES; }
};

// For reads, keeps the last of two threads for each of two warps: enough to know whether another thread, or
// another warp, has read.
struct Cell {
    Access write, elsewhere, reads[4];
};

struct Page {
    uintptr_t number = 0;
    Cell* cells = nullptr;
};

struct Finding {
    std::string kernel;
    Class what;
    bool shared;
    Kind kinds[2];
    uint32_t at[2];
    bool operator<(const Finding& other) const { return key() < other.key(); }
    std::tuple<const std::string&, Class, bool, Kind, Kind, uint32_t, uint32_t> key() const {
        return {kernel, what, shared, kinds[0], kinds[1], at[0], at[1]};
    }
};

struct Example {
    uint64_t count;
    std::string text;
};

struct Launched {
    uint64_t launches;
    uint32_t most_blocks, most_threads;
};

// The report of the process.
struct Report {
    std::mutex lock;
    std::map<Finding, Example> findings;
    std::map<std::string, Launched> kernels;
    ~Report();
};

Report& report() {
    static Report all;
    return all;
}

uintptr_t base() {
    static const uintptr_t start = [] {
        Dl_info info;
        return dladdr(reinterpret_cast<void*>(&base), &info) != 0 ? reinterpret_cast<uintptr_t>(info.dli_fbase) : 0;
    }();
    return start;
}

// A write that may repeat an earlier one: `bytes` at `place`, which hold `before` until the write is done.
struct Pending {
    const unsigned char* place;
    uint32_t bytes;
    uint16_t before;
    Access then, now;
    Class what;
};

struct Range {
    uintptr_t from;
    size_t bytes;
};

// The detector of a thread of the process.
struct Detector {
    std::string kernel;
    uint32_t launch_start = 1, block_start = 1, epoch_start = 1, tick = 1;
    std::vector<uint32_t> blocks;  // the tick at which each began
    uint32_t grid[3] = {};
    uint32_t synced[32] = {}, met[32] = {};
    const void* waiting[32] = {};
    uintptr_t shared = 0;
    size_t shared_bytes = 0;
    bool runs = false;
    uint16_t thread = 0;
    Range stack = {};
    std::vector<Range> ignored;
    std::vector<Pending> pending;
    std::unordered_map<uintptr_t, Cell*> pages;
    std::vector<Page> at_hand = std::vector<Page>(PAGES_AT_HAND);

    ~Detector() {
        for (auto& page : pages) free(page.second);
    }

    Cell* page(uintptr_t number) {
        Page& near = at_hand[number % PAGES_AT_HAND];
        if (near.cells != nullptr && near.number == number) return near.cells;
        Cell*& cells = pages[number];
        if (cells == nullptr) cells = static_cast<Cell*>(calloc(PAGE_CELLS, sizeof(Cell)));
        if (cells == nullptr) abort();
        near = {number, cells};
        return cells;
    }

    // Calls `each` for the cells of an access, with their addresses.
    template <typename Each> void each(uintptr_t at, size_t bytes, const Each& each_cell) {
        if (bytes == 1) return each_cell(page(at / PAGE_CELLS * 2 + 1)[at % PAGE_CELLS], at);
        for (uintptr_t place = at & ~uintptr_t(1); place < at + bytes;) {
            Cell* cells = page(place / 2 / PAGE_CELLS * 2);
            for (size_t i = place / 2 % PAGE_CELLS; i < PAGE_CELLS && place < at + bytes; i++, place += 2)
                each_cell(cells[i], place);
        }
    }

    bool is_shared(uintptr_t at) const { return at - shared < shared_bytes; }

    void note(Class what, bool shared_memory, const Access& then, const Access& now) {
        Report& all = report();
        std::lock_guard<std::mutex> hold(all.lock);
        Finding finding = {kernel, what, shared_memory, {then.kind, now.kind}, {then.at, now.at}};
        Example& example = all.findings[finding];
        if (example.count++ != 0) return;
        char text[160];
        snprintf(text, sizeof text, "%s and %s", name(then).c_str(), name(now).c_str());
        example.text = text;
    }

    std::string name(const Access& access) const {
        if (access.kind == None) return "no thread";
        auto after = std::upper_bound(blocks.begin(), blocks.end(), access.tick);
        uint32_t number = uint32_t(after - blocks.begin()) - 1;
        char text[96];
        uint32_t length = uint32_t(snprintf(text, sizeof text, "block (%u, %u, %u) ", number % grid[0],
                                            number / grid[0] % grid[1], number / grid[0] / grid[1]));
        if (access.thread & WHOLE_WARP) snprintf(text + length, sizeof text - length, "warp %u", access.warp());
        else snprintf(text + length, sizeof text - length, "thread %u", access.thread);
        return text;
    }

    // Whether an earlier access is not ordered before the thread's next one.
    bool unordered(const Access& then, uint16_t own, bool shared_memory, Class& what) const {
        if (then.tick < (shared_memory ? block_start : launch_start)) return false;
        what = Race;
        if (then.tick < block_start) return true;
        if (then.tick < epoch_start || then.thread == own) return false;
        uint32_t warp = uint32_t(own & ~WHOLE_WARP) / WARP_LANES;
        if (then.warp() != warp) return true;
        if (then.tick < synced[warp]) return false;
        if (then.tick < met[warp]) what = Weak;
        return true;
    }

    void settle() {
        for (const Pending& write : pending) {
            uint16_t after = 0;
            std::memcpy(&after, write.place, write.bytes);
            note(after == write.before ? SameValue : write.what, is_shared(uintptr_t(write.place)), write.then, write.now);
        }
        pending.clear();
    }

    bool in_flight(const Cell& cell) const { return cell.write.kind == Copy && cell.write.tick >= block_start; }

    void read(uintptr_t at, size_t bytes, const Access& now) {
        bool in_shared = is_shared(at);
        each(at, bytes, [&](Cell& cell, uintptr_t) {
            Class what;
            if (in_shared && cell.write.tick < block_start) note(Unwritten, true, {0, 0, 0, None}, now);
            if (in_shared && in_flight(cell)) note(InFlight, true, cell.write, now);
            else if (unordered(cell.write, now.thread, in_shared, what)) note(what, in_shared, cell.write, now);
            Access* reads = cell.reads;
            if (reads[0].tick < epoch_start) {
                if (!in_shared && reads[0].tick < block_start) cell.elsewhere = reads[0];
                reads[0] = now;
                reads[1] = reads[2] = reads[3] = Access();
                return;
            }
            if (reads[0].warp() != now.warp()) {
                reads += 2;
                if (reads[0].kind != None && reads[0].warp() != now.warp()) return;
            }
            if (reads[0].kind != None && reads[0].thread != now.thread) reads[1] = reads[0];
            reads[0] = now;
        });
    }

    void write(uintptr_t at, size_t bytes, const Access& now) {
        bool in_shared = is_shared(at);
        each(at, bytes, [&](Cell& cell, uintptr_t place) {
            Class what;
            bool atomics = cell.write.kind == Atomic && now.kind == Atomic;
            if (in_shared && in_flight(cell)) {
                note(InFlight, true, cell.write, now);
            } else if (!atomics && unordered(cell.write, now.thread, in_shared, what)) {
                if (cell.write.kind == Write && now.kind == Write) {
                    auto held = reinterpret_cast<const unsigned char*>(place);
                    Pending later = {held, bytes == 1 ? 1u : 2u, 0, cell.write, now, what};
                    std::memcpy(&later.before, held, later.bytes);
                    pending.push_back(later);
                } else {
                    note(what, in_shared, cell.write, now);
                }
            }
            for (const Access& earlier : cell.reads)
                if (earlier.kind != None && unordered(earlier, now.thread, in_shared, what)) note(what, in_shared, earlier, now);
            if (!in_shared && cell.elsewhere.kind != None && unordered(cell.elsewhere, now.thread, false, what))
                note(what, false, cell.elsewhere, now);
            cell = Cell();
            cell.write = now;
        });
    }

    Access access(Kind kind, const void* at) const {
        return {tick, uint32_t(reinterpret_cast<uintptr_t>(at) - base()), thread, kind};
    }
};

thread_local Detector* entered = nullptr;

// Whether to ignore the barrier of this line, to test the detector and the tests.
bool left_out(int line) {
    static const int without = [] {
        const char* number = getenv("RLOOD_RACES_WITHOUT");
        return number == nullptr ? 0 : atoi(number);
    }();
    return line == without;
}

// The compiler's call before an access.
void touched(const void* place, size_t bytes, Kind kind, const void* at) {
    Detector* d = entered;
    if (d == nullptr || !d->runs) return;
    auto address = reinterpret_cast<uintptr_t>(place);
    if (address - d->stack.from < d->stack.bytes) return;
    for (const Range& range : d->ignored)
        if (address - range.from < range.bytes) return;
    if (!d->pending.empty()) d->settle();
    if (kind == Read) d->read(address, bytes, d->access(kind, at));
    else d->write(address, bytes, d->access(kind, at));
}

// Finds the files and lines of addresses, the innermost first.
std::map<uint32_t, std::string> lines_of(const std::map<Finding, Example>& findings) {
    std::map<uint32_t, std::string> lines;
    for (auto& [finding, example] : findings) lines[finding.at[0]], lines[finding.at[1]];
    Dl_info info;
    if (lines.empty() || dladdr(reinterpret_cast<void*>(&base), &info) == 0) return lines;
    std::string command = std::string("addr2line -a -i -s -e '") + info.dli_fname + "'";
    for (auto& line : lines) {
        char address[32];
        // The call is just before the address to which it returns.
        snprintf(address, sizeof address, " 0x%x", line.first == 0 ? 0 : line.first - 1);
        command += address;
    }
    FILE* output = popen(command.c_str(), "r");
    if (output == nullptr) return lines;
    char line[1024];
    auto current = lines.begin();
    bool first = true;
    while (fgets(line, sizeof line, output) != nullptr) {
        std::string text(line, strcspn(line, " \n"));
        if (text.compare(0, 2, "0x") == 0) {
            if (!first) ++current;
            first = false;
        } else if (current != lines.end()) {
            current->second += (current->second.empty() ? "" : " < ") + text;
        }
    }
    pclose(output);
    return lines;
}

std::string described(const std::map<Finding, Example>& findings) {
    auto lines = lines_of(findings);
    std::string text;
    for (auto& [finding, example] : findings) {
        text += finding.kernel + ": " + CLASSES[finding.what] + (finding.shared ? ", shared: " : ", global: ");
        if (finding.kinds[0] != None)
            text += std::string(KINDS[finding.kinds[0]]) + " at " + lines[finding.at[0]] + "; ";
        text += std::string(KINDS[finding.kinds[1]]) + " at " + lines[finding.at[1]] + "; " + example.text + "; " +
                std::to_string(example.count) + " times\n";
    }
    return text;
}

// Writes to the file that RLOOD_RACES_REPORT names; without it, writes the findings to the standard error output.
Report::~Report() {
    std::map<Finding, Example> meant;
    for (auto& finding : findings)
        if (finding.first.kernel.compare(0, 6, "wrong_") != 0) meant.insert(finding);
    std::string text = described(meant);
    const char* path = getenv("RLOOD_RACES_REPORT");
    FILE* file = path == nullptr ? stderr : fopen(path, "a");
    if (file == nullptr) return;
    fputs(text.c_str(), file);
    if (path != nullptr) {
        for (auto& [name, launched] : kernels)
            fprintf(file, "%s: %llu launches, at most %u blocks, %u threads\n", name.c_str(),
                    static_cast<unsigned long long>(launched.launches), launched.most_blocks, launched.most_threads);
        fclose(file);
    }
}

}  // namespace

void registered(const char* kernel) { report().kernels[kernel]; }

void launch(const char* kernel, const uint32_t* grid, uint32_t threads) {
    static thread_local Detector own;
    entered = &own;
    Detector& d = own;
    {
        Report& all = report();
        std::lock_guard<std::mutex> hold(all.lock);
        Launched& launched = all.kernels[kernel];
        launched.launches++;
        launched.most_blocks = std::max(launched.most_blocks, grid[0] * grid[1] * grid[2]);
        launched.most_threads = std::max(launched.most_threads, threads);
    }
    if (d.tick > LAST_TICK) {
        for (auto& page : d.pages) std::memset(page.second, 0, PAGE_CELLS * sizeof(Cell));
        d.tick = 0;
    }
    d.kernel = kernel;
    d.launch_start = ++d.tick;
    d.blocks.clear();
    d.ignored.clear();
    d.pending.clear();
    std::memcpy(d.grid, grid, sizeof d.grid);
    d.runs = false;
}

void ignore(const void* from, size_t bytes) { entered->ignored.push_back({reinterpret_cast<uintptr_t>(from), bytes}); }

void block(const void* shared, size_t bytes) {
    Detector& d = *entered;
    d.settle();
    d.block_start = d.epoch_start = ++d.tick;
    d.blocks.push_back(d.tick);
    d.shared = reinterpret_cast<uintptr_t>(shared);
    d.shared_bytes = bytes;
}

void enter(uint32_t thread, const void* stack, size_t bytes) {
    Detector& d = *entered;
    d.runs = true;
    d.thread = uint16_t(thread);
    d.stack = {reinterpret_cast<uintptr_t>(stack), bytes};
}

void leave() {
    entered->settle();
    entered->runs = false;
}

void barrier(int line) {
    if (!left_out(line)) entered->epoch_start = ++entered->tick;
}

void collective(uint32_t warp, bool sync, int line) {
    Detector& d = *entered;
    if (sync && left_out(line)) return;
    d.met[warp] = ++d.tick;
    if (sync) d.synced[warp] = d.tick;
}

void waits(const void* at) { entered->waiting[entered->thread / WARP_LANES] = at; }

void matrix(uint32_t warp, const void* row) {
    Detector& d = *entered;
    Access now = d.access(Matrix, d.waiting[warp]);
    now.thread = uint16_t(warp * WARP_LANES) | WHOLE_WARP;
    d.read(reinterpret_cast<uintptr_t>(row), 16, now);
}

void copy_begins(const void* to, const void* from, uint32_t bytes, const void* at) {
    Detector& d = *entered;
    d.settle();
    Access now = d.access(Copy, at);
    if (from != nullptr) d.read(reinterpret_cast<uintptr_t>(from), bytes, now);
    d.write(reinterpret_cast<uintptr_t>(to), bytes, now);
}

void copy_ends(const void* to, uint32_t bytes) {
    Detector& d = *entered;
    d.settle();
    d.each(reinterpret_cast<uintptr_t>(to), bytes, [&](Cell& cell, uintptr_t) {
        if (cell.write.kind != Copy || cell.write.thread != d.thread) return;
        cell.write.kind = Write;
        cell.write.tick = d.tick;
    });
}

void atomic(const void* place, uint32_t bytes, const void* at) { touched(place, bytes, Atomic, at); }

}  // namespace emulator::races

// Returns the report for a kernel, or null; it stays valid until the process ends.
extern "C" const char* rlood_emulator_races(const char* name, size_t name_bytes) {
    using namespace emulator::races;
    std::string kernel(name, name_bytes);
    Report& all = report();
    std::lock_guard<std::mutex> hold(all.lock);
    std::map<Finding, Example> of_kernel;
    for (auto& finding : all.findings)
        if (finding.first.kernel == kernel) of_kernel.insert(finding);
    if (of_kernel.empty()) return nullptr;
    return strdup(described(of_kernel).c_str());
}

// The calls inserted by -fsanitize=thread.
#define HERE __builtin_return_address(0)
#define TOUCHED(bytes)                                                                                                 \
    extern "C" void __tsan_read##bytes(void* at) { emulator::races::touched(at, bytes, emulator::races::Read, HERE); }   \
    extern "C" void __tsan_write##bytes(void* at) { emulator::races::touched(at, bytes, emulator::races::Write, HERE); } \
    extern "C" void __tsan_unaligned_read##bytes(void* at) {                                                           \
        emulator::races::touched(at, bytes, emulator::races::Read, HERE);                                              \
    }                                                                                                                  \
    extern "C" void __tsan_unaligned_write##bytes(void* at) {                                                          \
        emulator::races::touched(at, bytes, emulator::races::Write, HERE);                                             \
    }
TOUCHED(1)
TOUCHED(2)
TOUCHED(4)
TOUCHED(8)
TOUCHED(16)
extern "C" void __tsan_read_range(void* at, size_t bytes) {
    emulator::races::touched(at, bytes, emulator::races::Read, HERE);
}
extern "C" void __tsan_write_range(void* at, size_t bytes) {
    emulator::races::touched(at, bytes, emulator::races::Write, HERE);
}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_init() {}

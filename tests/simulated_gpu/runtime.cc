// A CUDA runtime and driver without a device, for tests on hosts that have none.
//
// Device memory is the host's own. Kernels are not run but counted, by name: what they would compute,
// operators.py computes on the same memory. Streams run at once, one operation after the other. What a stream
// that is being captured would refuse is refused here, too.
//
// Copies between device and pinned memory keep their promises late: what comes to the host is there only when
// the host has waited for it, and what goes to the device must not be changed before.
//
// What streams touch in device memory is remembered until the host has waited for it. Two streams that touch the
// same bytes, one of them to write, and neither of which has waited for the other, are a race.

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr size_t kMemory = size_t(80) << 30;
constexpr size_t kPage = 4096;
constexpr long kEverything = LONG_MAX;

enum Kind { kUnknown = 0, kDevice = 1, kPinned = 2 };

struct Range {
  size_t size;
  Kind kind;
};

// What a stream does to some bytes.
struct Access {
  char *low, *high;
  bool writes;
  std::string what;
  long time = 0;  // of its stream
};

// How far the operations of each stream have come, as somebody knows for certain.
using Clock = std::map<cudaStream_t, long>;

struct Graph {
  std::vector<std::function<void()>> nodes;
  std::vector<Access> accesses;
};

struct Capture {
  Graph* graph;
  cudaStream_t origin;
  std::set<cudaStream_t> streams;
  unsigned long long id;
};

struct Event {
  double ms = -1;
  long copies = 0;  // that were queued before it
  Capture* capture = nullptr;
  Clock clock;  // of all that was before it
};

struct Copy {
  long number;
  char* host;
  std::string content;
  bool to_host;
};

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;
std::map<char*, Range> ranges;
size_t used = 0;
std::unordered_map<const void*, std::string> kernels;
std::map<std::string, long> counted;
std::unordered_map<cudaStream_t, Capture*> captures;
unsigned long long capture_ids = 0;
std::vector<Copy> copies;
long copies_queued = 0;
std::map<cudaStream_t, Clock> clocks;  // what each stream has waited for, itself included
Clock host;                            // what the host has waited for
std::map<cudaStream_t, std::deque<Access>> touched;
void (*python)(long) = nullptr;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

double now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
}

Capture* capture_of(cudaStream_t stream) {
  auto found = captures.find(stream);
  return found == captures.end() ? nullptr : found->second;
}

// What no stream may do while one is captured, unless a thread says that it knows better.
bool unsafe() { return !captures.empty() && capture_mode != cudaStreamCaptureModeRelaxed; }

void* allocate(size_t bytes, Kind kind) {
  size_t size = (bytes + kPage) / kPage * kPage;
  void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  ranges[static_cast<char*>(p)] = {size, kind};
  if (kind == kDevice) used += size;
  return p;
}

void release(void* p) {
  auto found = ranges.find(static_cast<char*>(p));
  if (found == ranges.end()) return;
  if (found->second.kind == kDevice) used -= found->second.size;
  munmap(p, found->second.size);
  ranges.erase(found);
}

Kind kind_of(const void* p) {
  auto found = ranges.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (found == ranges.begin()) return kUnknown;
  --found;
  return p < found->first + found->second.size ? found->second.kind : kUnknown;
}

void join(Clock& mine, const Clock& other) {
  for (auto& [stream, time] : other) mine[stream] = std::max(mine[stream], time);
}

void join_all(Clock& mine) {
  for (auto& [stream, clock] : clocks) join(mine, clock);
}

// A stream reads or writes device memory, or will when the graph that is captured runs.
void touch(cudaStream_t stream, Access access) {
  if (kind_of(access.low) != kDevice || access.low == access.high) return;
  if (Capture* capture = capture_of(stream)) return capture->graph->accesses.push_back(access);
  Clock& clock = clocks[stream];
  join(clock, host);
  access.time = ++clock[stream];
  for (auto& [other, theirs] : touched) {
    while (!theirs.empty() && theirs.front().time <= host[other]) theirs.pop_front();
    if (other == stream) continue;
    for (auto a = theirs.rbegin(); a != theirs.rend() && a->time > clock[other]; ++a)
      if (a->low < access.high && access.low < a->high && (a->writes || access.writes))
        counted["race: " + a->what + " and " + access.what + " on two streams"]++;
  }
  touched[stream].push_back(access);
}

void touch(cudaStream_t stream, const void* p, size_t bytes, bool writes, const std::string& what) {
  auto* low = static_cast<char*>(const_cast<void*>(p));
  touch(stream, {low, low + bytes, writes, what});
}

// Runs an operation of a stream; a capture also keeps it. What is captured is run as well, so that later
// operations of the capture find sizes and values as after a warm-up.
void queue(cudaStream_t stream, const std::string& name, const std::function<void()>& work) {
  Lock lock(mutex);
  if (Capture* capture = capture_of(stream))
    capture->graph->nodes.push_back(work);
  else
    counted["launch " + name]++;
  work();
}

void promise(void* to, const void* from, size_t bytes) {
  bool to_host = kind_of(to) == kPinned && kind_of(from) == kDevice;
  if (!to_host && !(kind_of(to) == kDevice && kind_of(from) == kPinned)) return;
  auto* host = static_cast<char*>(to_host ? to : const_cast<void*>(from));
  copies.push_back({++copies_queued, host, std::string(static_cast<const char*>(from), bytes), to_host});
  if (to_host) memset(to, 0x5a, bytes);
}

void arrive(long upto) {
  std::vector<Copy> later;
  for (Copy& copy : copies) {
    if (copy.number > upto)
      later.push_back(copy);
    else if (copy.to_host)
      memcpy(copy.host, copy.content.data(), copy.content.size());
    else if (memcmp(copy.host, copy.content.data(), copy.content.size()))
      counted["race: pinned memory changed before it was copied"]++;
  }
  copies.swap(later);
}

cudaError_t wait(const char* what, long upto = kEverything) {
  Lock lock(mutex);
  counted[std::string("wait ") + what]++;
  arrive(upto);
  return cudaSuccess;
}

int attribute(int which) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return INT_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrIntegrated:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 0;
    default: return 1;
  }
}

cudaError_t launch(const void* kernel, cudaStream_t stream) {
  Lock lock(mutex);
  auto found = kernels.find(kernel);
  queue(stream, "kernel " + (found == kernels.end() ? "?" : found->second), [] {});
  return cudaSuccess;
}

cudaError_t find_driver_function(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function ? cudaSuccess : cudaErrorSymbolNotFound;
}

}  // namespace

// -- for operators.py ------------------------------------------------------------------------------------

API void sim_set_python(void (*function)(long)) { python = function; }
API int sim_is_capturing(void* stream) {
  Lock lock(mutex);
  return capture_of(static_cast<cudaStream_t>(stream)) != nullptr;
}
// Keeps a call of ``python`` with ``id`` in the stream's capture.
API void sim_keep(void* stream, long id) {
  Lock lock(mutex);
  capture_of(static_cast<cudaStream_t>(stream))->graph->nodes.push_back([id] { python(id); });
}
API void sim_count(const char* what) {
  Lock lock(mutex);
  counted[what]++;
}
API void sim_wait(void* stream, const char* what) {
  Lock lock(mutex);
  join(host, clocks[static_cast<cudaStream_t>(stream)]);
  wait(what);
}
API void sim_touch(void* stream, const void* p, long bytes, int writes, const char* what) {
  Lock lock(mutex);
  touch(static_cast<cudaStream_t>(stream), p, bytes, writes, what);
}
// A copy that is over only when the host has waited: its number. The oldest of those that are not over.
API long sim_promise(void* to, const void* from, long bytes) {
  Lock lock(mutex);
  promise(to, from, bytes);
  return copies_queued;
}
API long sim_oldest_promise() {
  Lock lock(mutex);
  return copies.empty() ? copies_queued + 1 : copies.front().number;
}
API int sim_is_pinned(const void* p) {
  Lock lock(mutex);
  return kind_of(p) == kPinned;
}
// Lines "count<TAB>what"; returns how many bytes there are.
API long sim_report(char* out, long size) {
  Lock lock(mutex);
  std::string lines;
  for (auto& [what, count] : counted) lines += std::to_string(count) + "\t" + what + "\n";
  snprintf(out, size, "%s", lines.c_str());
  return lines.size();
}

// -- kernels ---------------------------------------------------------------------------------------------

API void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  Lock lock(mutex);
  kernels[host] = name;
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API char __cudaInitModule(void**) { return 1; }
API cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
namespace {
thread_local struct {
  dim3 grid, block;
  size_t shared;
  void* stream;
} pushed;
}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}
API cudaError_t cudaLaunchKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(f, s); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t f, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(f, s); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* f, void**) { return launch(f, c->stream); }
API cudaError_t cudaLaunchCooperativeKernel(const void* f, dim3, dim3, void**, size_t, cudaStream_t s) { return launch(f, s); }
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, const void*) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* n, const void*, int, size_t) { return *n = 2, cudaSuccess; }
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t, unsigned) { return *n = 2, cudaSuccess; }
API cudaError_t cudaGetSymbolAddress(void** p, const void* symbol) { return *p = const_cast<void*>(symbol), cudaSuccess; }
API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }

// -- the device ------------------------------------------------------------------------------------------

API cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
API cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) { return device ? fail(cudaErrorInvalidDevice) : cudaSuccess; }
API cudaError_t cudaDeviceGetAttribute(int* v, cudaDeviceAttr which, int) { return *v = attribute(which), cudaSuccess; }
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "Simulated H100");
  p->totalGlobalMem = kMemory;
  p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->warpSize = 32, p->l2CacheSize = 50 << 20;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = INT_MAX, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048, p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->concurrentKernels = p->unifiedAddressing = p->cooperativeLaunch = 1;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char* s, int n, int) { return snprintf(s, n, "0000:01:00.0"), cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, cudaSuccess; }
API cudaError_t cudaDeviceGetGraphMemAttribute(int, cudaGraphMemAttributeType, void* v) { return *static_cast<size_t*>(v) = 0, cudaSuccess; }
API cudaError_t cudaDeviceSetGraphMemAttribute(int, cudaGraphMemAttributeType, void*) { return cudaSuccess; }
API cudaError_t cudaDeviceSynchronize() {
  Lock lock(mutex);
  if (unsafe()) return fail(cudaErrorStreamCaptureUnsupported);
  join_all(host);
  return wait("for the device");
}
API cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
API const char* cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorSimulated" : "cudaSuccess"; }
API const char* cudaGetErrorString(cudaError_t e) {
  if (e == cudaErrorStreamCaptureUnsupported) return "operation not permitted while a stream is captured";
  return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "refused by the simulated device" : "no error";
}
API cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaProfilerStart() { return cudaSuccess; }
API cudaError_t cudaProfilerStop() { return cudaSuccess; }
API cudaError_t cudaGetDriverEntryPoint(const char* n, void** f, unsigned long long, cudaDriverEntryPointQueryResult* r) { return find_driver_function(n, f, r); }
API cudaError_t cudaGetDriverEntryPointByVersion(const char* n, void** f, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* r) { return find_driver_function(n, f, r); }

// -- memory ----------------------------------------------------------------------------------------------

namespace {
cudaError_t give(void** p, size_t bytes, Kind kind) {
  Lock lock(mutex);
  if (unsafe()) return fail(cudaErrorStreamCaptureUnsupported);
  if (kind == kDevice && used + bytes > kMemory) return fail(cudaErrorMemoryAllocation);
  *p = allocate(bytes, kind);
  return *p ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t take_back(void* p) {
  Lock lock(mutex);
  if (p && unsafe()) return fail(cudaErrorStreamCaptureUnsupported);
  join_all(host);  // it waits for the device
  release(p);
  return cudaSuccess;
}
}  // namespace
API cudaError_t cudaMalloc(void** p, size_t bytes) { return give(p, bytes, kDevice); }
API cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return give(p, bytes, kDevice); }
API cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return give(p, bytes, kPinned); }
API cudaError_t cudaMallocHost(void** p, size_t bytes) { return give(p, bytes, kPinned); }
API cudaError_t cudaFree(void* p) { return take_back(p); }
API cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return take_back(p); }
API cudaError_t cudaFreeHost(void* p) { return take_back(p); }
API cudaError_t cudaHostRegister(void*, size_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaHostUnregister(void*) { return cudaSuccess; }
API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  Lock lock(mutex);
  *total = kMemory, *free = kMemory - used;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* a, const void* p) {
  Lock lock(mutex);
  memset(a, 0, sizeof *a);
  Kind kind = kind_of(p);
  a->type = kind == kDevice ? cudaMemoryTypeDevice : kind == kPinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->devicePointer = kind ? const_cast<void*>(p) : nullptr;
  a->hostPointer = kind == kPinned ? const_cast<void*>(p) : nullptr;
  return cudaSuccess;
}
API cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  Lock lock(mutex);
  if (capture_of(stream) && !(kind_of(to) && kind_of(from))) return fail(cudaErrorStreamCaptureUnsupported);
  touch(stream, from, bytes, false, "copy");
  touch(stream, to, bytes, true, "copy");
  queue(stream, "copy", [=] {
    memmove(to, from, bytes);
    promise(to, from, bytes);
  });
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  Lock lock(mutex);
  if (unsafe()) return fail(cudaErrorStreamCaptureUnsupported);
  join_all(host);
  wait("for a copy");
  memmove(to, from, bytes);
  return cudaSuccess;
}
API cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t n, cudaStream_t s) { return cudaMemcpyAsync(to, from, n, cudaMemcpyDefault, s); }
API cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  Lock lock(mutex);
  touch(stream, p, bytes, true, "fill");
  queue(stream, "fill", [=] { memset(p, value, bytes); });
  return cudaSuccess;
}
API cudaError_t cudaMemset(void* p, int value, size_t bytes) { return memset(p, value, bytes), cudaSuccess; }

// -- streams and events ----------------------------------------------------------------------------------

API cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(new char[64]);
  return cudaSuccess;
}
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return cudaStreamCreate(stream); }
API cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
API cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(mutex);
  return capture_of(stream) ? fail(cudaErrorStreamCaptureUnsupported) : copies.empty() ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(mutex);
  if (capture_of(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  join(host, clocks[stream]);
  return wait("for a stream");
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Lock lock(mutex);
  auto* e = reinterpret_cast<Event*>(event);
  join(clocks[stream], e->clock);
  Capture* capture = e->capture;
  if (capture && capture->graph) {  // the stream joins the capture
    captures[stream] = capture;
    capture->streams.insert(stream);
  }
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void* data, unsigned) { return f(s, cudaSuccess, data), cudaSuccess; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t f, void* data) { return f(data), cudaSuccess; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) { return delete reinterpret_cast<Event*>(event), cudaSuccess; }
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Lock lock(mutex);
  Clock clock = clocks[stream];
  join(clock, host);
  *reinterpret_cast<Event*>(event) = {now_ms(), copies_queued, capture_of(stream), clock};
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(mutex);
  auto* e = reinterpret_cast<Event*>(event);
  if (e->capture) return fail(cudaErrorCapturedEvent);
  if (!copies.empty() && copies.front().number <= e->copies) return cudaErrorNotReady;
  join(host, e->clock);
  return cudaSuccess;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(mutex);
  auto* e = reinterpret_cast<Event*>(event);
  if (e->capture) return fail(cudaErrorCapturedEvent);
  join(host, e->clock);
  return wait("for an event", e->copies);
}
API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  if (cudaEventQuery(from) || cudaEventQuery(to)) return cudaErrorNotReady;
  *ms = reinterpret_cast<Event*>(to)->ms - reinterpret_cast<Event*>(from)->ms;
  return cudaSuccess;
}

// -- graphs ----------------------------------------------------------------------------------------------

API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { return std::swap(capture_mode, *mode), cudaSuccess; }
API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  Lock lock(mutex);
  if (!stream || capture_of(stream)) return fail(cudaErrorIllegalState);
  captures[stream] = new Capture{new Graph, stream, {stream}, ++capture_ids};
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  if (!capture || capture->origin != stream) return fail(cudaErrorStreamCaptureUnmatched);
  for (cudaStream_t joined : capture->streams) captures.erase(joined);
  auto key = [](const Access& a) { return std::make_tuple(a.low, a.high, a.writes); };
  auto& accesses = capture->graph->accesses;
  std::sort(accesses.begin(), accesses.end(), [=](auto& a, auto& b) { return key(a) < key(b); });
  auto twice = std::unique(accesses.begin(), accesses.end(), [=](auto& a, auto& b) { return key(a) == key(b); });
  accesses.erase(twice, accesses.end());
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  capture->graph = nullptr;  // over, for the events that remember it
  return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Lock lock(mutex);
  *status = capture_of(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  Lock lock(mutex);
  Capture* capture = capture_of(stream);
  *status = capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph) : nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
  *runnable = reinterpret_cast<cudaGraphExec_t>(graph);
  return cudaSuccess;
}
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t* r, cudaGraph_t g, unsigned long long flags) { return cudaGraphInstantiateWithFlags(r, g, flags); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
  sim_count("launch graph");
  auto* graph = reinterpret_cast<Graph*>(runnable);
  {
    Lock lock(mutex);
    for (auto& access : graph->accesses) touch(stream, access);
  }
  for (auto& node : graph->nodes) node();
  return cudaSuccess;
}
API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* n) { return *n = reinterpret_cast<Graph*>(graph)->nodes.size(), cudaSuccess; }
API cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
API cudaError_t cudaUserObjectCreate(cudaUserObject_t*, void*, cudaHostFn_t, unsigned, unsigned) { return cudaSuccess; }
API cudaError_t cudaUserObjectRelease(cudaUserObject_t, unsigned) { return cudaSuccess; }
API cudaError_t cudaGraphRetainUserObject(cudaGraph_t, cudaUserObject_t, unsigned, unsigned) { return cudaSuccess; }

// -- the driver ------------------------------------------------------------------------------------------

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuDriverGetVersion(int* v) { return *v = 13000, CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int* n) { return *n = 1, CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice* device, int) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuDeviceGetName(char* s, int n, CUdevice) { return snprintf(s, n, "Simulated H100"), CUDA_SUCCESS; }
API CUresult cuDeviceGetAttribute(int* v, CUdevice_attribute which, CUdevice) { return *v = attribute(which), CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { return *flags = 0, *active = 1, CUDA_SUCCESS; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* c, CUdevice) { return *c = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext* c) { return *c = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuCtxGetLimit(size_t* v, CUlimit) { return *v = 0, CUDA_SUCCESS; }
API CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
API CUresult cuGetErrorString(CUresult, const char** s) { return *s = "refused by the simulated driver", CUDA_SUCCESS; }
API CUresult cuPointerGetAttribute(void* v, CUpointer_attribute which, CUdeviceptr p) {
  Lock lock(mutex);
  auto* address = reinterpret_cast<void*>(p);
  if (which == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
    *static_cast<CUdeviceptr*>(v) = p;
  else
    *static_cast<unsigned*>(v) = which != CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? 0 : kind_of(address) == kDevice ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  return CUDA_SUCCESS;
}

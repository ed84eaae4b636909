/* The part of NVIDIA's libnvidia-ml.so.1 that this package calls, as nvml.h declares it.
 *
 * Each call looks its answer up in the file that FAKE_NVML names: lines of `key value`. A key that is missing means
 * NVML_ERROR_NOT_SUPPORTED, and a value of `!15` the error 15 (NVML_ERROR_GPU_IS_LOST).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Return;
typedef struct { int index; } *Device;
static struct { int index; } devices[16];

static Return look_up(const char *key, unsigned long long *value) {
    char name[64], text[64];
    Return found = 3;
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    while (file && fscanf(file, "%63s %63s", name, text) == 2)
        if (!strcmp(name, key)) {
            found = text[0] == '!' ? atoi(text + 1) : 0;
            *value = strtoull(text, NULL, 0);
        }
    if (file) fclose(file);
    return found;
}

static Return of(Device gpu, const char *what, unsigned long long *value) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", gpu->index, what);
    return look_up(key, value);
}

static Return of32(Device gpu, const char *what, unsigned int *value) {
    unsigned long long wide = 0;
    Return found = of(gpu, what, &wide);
    *value = (unsigned int)wide;
    return found;
}

Return nvmlInitWithFlags(unsigned int flags) { unsigned long long error; return look_up("init", &error); }
Return nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(Return result) { return "an error of the fake driver"; }
Return nvmlDeviceGetCount_v2(unsigned int *count) {
    unsigned long long wide = 0;
    Return found = look_up("count", &wide);
    *count = (unsigned int)wide;
    return found;
}
Return nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *gpu) {
    devices[index].index = index;
    *gpu = (Device)&devices[index];
    return 0;
}
Return nvmlDeviceGetMemoryInfo(Device gpu, unsigned long long *total_free_used) {
    Return found = of(gpu, "memory_total", &total_free_used[0]);
    return found ? found : of(gpu, "memory_used", &total_free_used[2]);
}
Return nvmlDeviceGetUtilizationRates(Device gpu, unsigned int *gpu_memory) { return of32(gpu, "load", &gpu_memory[0]); }
Return nvmlDeviceGetPowerUsage(Device gpu, unsigned int *milliwatts) { return of32(gpu, "power", milliwatts); }
Return nvmlDeviceGetEnforcedPowerLimit(Device gpu, unsigned int *limit) { return of32(gpu, "power_limit", limit); }
Return nvmlDeviceGetClockInfo(Device gpu, int type, unsigned int *clock) {
    return of32(gpu, type == 1 ? "sm_clock" : type == 2 ? "memory_clock" : "another_clock", clock);
}
Return nvmlDeviceGetTemperature(Device gpu, int sensor, unsigned int *celsius) {
    return of32(gpu, sensor == 0 ? "celsius" : "another_sensor", celsius);
}
Return nvmlDeviceGetCurrentClocksThrottleReasons(Device gpu, unsigned long long *reasons) {
    return of(gpu, "reasons", reasons);
}
Return nvmlDeviceGetTotalEccErrors(Device gpu, int type, int counter, unsigned long long *count) {
    return of(gpu, type == 1 && counter == 0 ? "memory_errors" : "other_memory_errors", count);
}

/* Events: the key `xid` holds the one that the next wait gets, each new value once. */
struct Event { Device gpu; unsigned long long type, data; unsigned int instance, compute_instance; };
static unsigned long long told_xid;
static Device listening;
Return nvmlEventSetCreate(void **set) { told_xid = 0; *set = &told_xid; return 0; }
Return nvmlDeviceRegisterEvents(Device gpu, unsigned long long types, void *set) {
    if (types != 8 || set != &told_xid) return 2;
    listening = gpu;
    return 0;
}
Return nvmlEventSetWait_v2(void *set, struct Event *event, unsigned int timeout_ms) {
    unsigned long long xid = 0;
    look_up("xid", &xid);
    if (!listening || !xid || xid == told_xid) return 10;
    told_xid = xid;
    *event = (struct Event){listening, 8, xid, 0xFFFFFFFF, 0xFFFFFFFF};
    return 0;
}
Return nvmlEventSetFree(void *set) { return 0; }

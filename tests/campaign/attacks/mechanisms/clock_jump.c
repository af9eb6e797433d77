/* The wall clock of a process, with an offset that can change while it runs; for LD_PRELOAD.
 *
 * CLOCK_JUMP_FILE names a file of eight bytes: nanoseconds to add. The monotonic clock stays. Waits for a moment of the
 * wall clock end early or late after a jump, as they do when the machine's clock jumps.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL
#define LONGEST_WAIT_NS (BILLION / 10)

static volatile int64_t nothing;
static volatile int64_t *offset_ns = &nothing;
static int (*real_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void open_offset(void)
{
    const char *path = getenv("CLOCK_JUMP_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *there = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (there != MAP_FAILED)
        offset_ns = there;
}

static int is_wall(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

static int true_time(clockid_t clock, struct timespec *at)
{
    if (!real_gettime)
        real_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real_gettime(clock, at);
}

static struct timespec moment(int64_t ns)
{
    return (struct timespec){.tv_sec = ns / BILLION, .tv_nsec = ns % BILLION};
}

static int64_t ns_of(const struct timespec *at)
{
    return (int64_t)at->tv_sec * BILLION + at->tv_nsec;
}

int clock_gettime(clockid_t clock, struct timespec *at)
{
    int failed = true_time(clock, at);
    if (!failed && is_wall(clock))
        *at = moment(ns_of(at) + *offset_ns);
    return failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

/* The end of a short wait on the true clock toward a moment of the shifted one; false if that moment is over. */
static int next_wait(const struct timespec *until, struct timespec *end)
{
    struct timespec now;
    true_time(CLOCK_REALTIME, &now);
    int64_t left = ns_of(until) - *offset_ns - ns_of(&now);
    *end = moment(ns_of(&now) + (left < LONGEST_WAIT_NS ? left : LONGEST_WAIT_NS));
    return left > 0;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until)
{
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec end;
    if (!real)
        real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    for (;;) {
        int is_left = next_wait(until, &end);
        if (!real(semaphore, &end))
            return 0;
        if (errno != ETIMEDOUT || !is_left)
            return -1;
    }
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec end;
    if (!real) /* the default version: the oldest one has a smaller condition */
        real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlvsym(
            RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real)
        real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))dlsym(
            RTLD_NEXT, "pthread_cond_timedwait");
    if (until->tv_sec < BILLION) /* seconds of the monotonic clock */
        return real(cond, mutex, until);
    int is_left = next_wait(until, &end);
    int failed = real(cond, mutex, &end);
    return failed == ETIMEDOUT && is_left ? 0 : failed; /* a spurious wake-up: the caller looks, and waits again */
}

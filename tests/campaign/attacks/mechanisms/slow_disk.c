/* Disks that are slow, or fail, below some folders; for LD_PRELOAD.
 *
 * SLOW_DISK_FOLDERS names them, separated by colons; SLOW_DISK_FILE is a file of three numbers of eight bytes for each,
 * which can change meanwhile: nanoseconds that each write takes longer, nanoseconds that each fsync takes longer, and
 * the error with which both fail, 0 for none. After those of eight folders it holds, for each, how many calls were struck.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MOST_FOLDERS 8

enum what { WRITE, SYNC, ERROR, NUMBERS };

static volatile int64_t (*told)[NUMBERS];
static volatile int64_t *struck;
static char *folders[MOST_FOLDERS];
static int num_folders;

__attribute__((constructor)) static void open_told(void)
{
    const char *path = getenv("SLOW_DISK_FILE"), *named = getenv("SLOW_DISK_FOLDERS");
    int file = path && named ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *there = mmap(NULL, MOST_FOLDERS * (sizeof *told + sizeof *struck), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (there == MAP_FAILED)
        return;
    told = there;
    struck = (int64_t *)there + MOST_FOLDERS * NUMBERS;
    char *rest = strdup(named);
    while (rest && num_folders < MOST_FOLDERS)
        folders[num_folders++] = strsep(&rest, ":");
}

static int is_below(const char *path, const char *folder)
{
    size_t size = strlen(folder);
    return !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}

/* Wait; return whether the call must fail. */
static int strike(int file, enum what what)
{
    char link[64], path[4096];
    for (int i = 0; i < num_folders; i++) {
        int64_t wait_ns = told[i][what], error = told[i][ERROR];
        if (!wait_ns && !error)
            continue;
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t size = readlink(link, path, sizeof path - 1);
        path[size < 0 ? 0 : size] = '\0';
        if (!is_below(path, folders[i]))
            continue;
        __atomic_fetch_add(&struck[i], 1, __ATOMIC_RELAXED);
        struct timespec wait = {.tv_sec = wait_ns / 1000000000, .tv_nsec = wait_ns % 1000000000};
        nanosleep(&wait, NULL);
        errno = (int)error;
        return error != 0;
    }
    return 0;
}

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) \
        real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define WRITES(name, given, passed) \
    ssize_t name given \
    { \
        REAL(name); \
        return strike(file, WRITE) ? -1 : real passed; \
    }

#define SYNCS(name) \
    int name(int file) \
    { \
        REAL(name); \
        return strike(file, SYNC) ? -1 : real(file); \
    }

WRITES(write, (int file, const void *data, size_t size), (file, data, size))
WRITES(pwrite, (int file, const void *data, size_t size, off_t at), (file, data, size, at))
WRITES(pwrite64, (int file, const void *data, size_t size, off64_t at), (file, data, size, at))
WRITES(writev, (int file, const struct iovec *parts, int count), (file, parts, count))
WRITES(pwritev, (int file, const struct iovec *parts, int count, off_t at), (file, parts, count, at))
WRITES(pwritev64, (int file, const struct iovec *parts, int count, off64_t at), (file, parts, count, at))
SYNCS(fsync)
SYNCS(fdatasync)

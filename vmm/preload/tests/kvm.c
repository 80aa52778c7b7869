/* Loaded behind the preload library: descriptor 77 is a vCPU, which writes down what is asked of it. All other calls go
* to the kernel. Request 1 starts a new list, for the first vCPU or another one; request 2 reads the list. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static char list[256];
static int is_first, runs;

int ioctl(int fd, unsigned long request, ...) {
    va_list words;
    va_start(words, request);
    void *arg = va_arg(words, void *);
    va_end(words);
    if (fd != 77) return syscall(SYS_ioctl, fd, request, arg);
    char *end = list + strlen(list);
    switch ((uint32_t)request) {
    case 1: is_first = *(int *)arg, runs = 0, list[0] = 0; return 0;
    case 2: *(char **)arg = list; return 0;
    case 0x8138AE83: ((uint64_t *)arg)[34] = is_first ? 0xFEE00900 : 0xFEE00800; return 0;
    case 0xAE80:
        strcpy(end, "run ");
        /* The first one is ended by a signal. */
        return runs++ ? 0 : (errno = EINTR, -1);
    case 0x4008AE89: {
        uint32_t count = *(uint32_t *)arg;
        for (uint32_t at = 0; at < count; at++)
            end += sprintf(end, "%x=%x ", ((uint32_t *)arg)[2 + 4 * at], ((uint32_t *)arg)[4 + 4 * at]);
        return count;
    }
    }
    return errno = ENOTTY, -1;
}

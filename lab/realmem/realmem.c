/* realmem: puts the large memory of an unmodified program into one shared memfd, and attaches it to Ballast.
 *
 * Before: `ballast bench real` starts a program with this library in LD_PRELOAD. After: every anonymous private mapping
 * of LARGE bytes or more, and every reservation of RESERVED bytes or more, is a piece of one memfd that is mapped
 * shared, as guest RAM is. So is every malloc() of that
 * size, with REALMEM_MALLOC: for programs that use the C library's malloc(), whose own mappings no preload library
 * sees. So the program is a VM's guest that runs natively: one process, one VM.
 * Threads: any; one lock guards the map of free pages. Units: bytes, and pages of 4 KiB where a name says so.
 * Promise: a piece that is handed out reads as zeros, as a fresh mapping does. A program that needs more than the memfd
 * has gets ordinary memory, and realmem says so once.
 *
 * Freed pieces are handed out again and zeroed then, the lowest first, as a guest's kernel does: the host does not hear
 * of them. Memory that an allocator decommits (madvise(), or a mapping over it) is discarded, as by a balloon, and all
 * that is free when a program calls realmem_trim().
 *
 *   REALMEM_MIB      size of the memfd in MiB; required
 *   REALMEM_PRIVATE  a private mapping takes the memfd's place: memory as a VMM has it that runs without Ballast
 *   REALMEM_CLIENT   path of libballast_client.so; without it nothing is attached
 *   REALMEM_NAME     the VM's name
 *   BALLAST_SOCKET   where to attach
 *
 * The client is loaded into a link namespace of its own (dlmopen), so that its heap is not the program's.
 * What is not covered: memory by brk() and small malloc()s, stacks, and mappings that the C library makes for itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "ballast.h"

#define PAGE 4096ul
#define LARGE (64ul << 10)
#define UNIT (2ul << 20)
#define RESERVED (1ul << 30)

enum { FRESH = 0, TAKEN = 1, DIRTY = 2 }; /* free and zeros; in use; free with old bytes */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *base;             /* the mapping of the memfd; NULL: realmem is off */
static size_t pages;           /* its length in pages */
static uint8_t *used;          /* one byte a page: FRESH, TAKEN or DIRTY */
static uint32_t *length_of;    /* at the first page of a malloc(): its length in pages, else 0 */
static int memfd = -1;         /* -1 with REALMEM_PRIVATE */
static int is_full_told;
static const ballast_client *client;
static int (*discard_by)(const ballast_client *, const struct ballast_range *, size_t);

extern void *__libc_malloc(size_t);
extern void __libc_free(void *);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static void *real_mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, at, len, prot, flags, fd, offset);
}

static void say(const char *text) {
    if (write(2, text, strlen(text)) < 0) return;
}

static int is_ours(const void *at) {
    return base != NULL && (const char *)at >= base && (const char *)at < base + pages * PAGE;
}

static size_t pages_of(size_t len) {
    return (len + PAGE - 1) / PAGE;
}

/* Frees the memory of these pages: they read as zeros from now on. */
static void discard(void *at, size_t len) {
    if (client != NULL) {
        struct ballast_range range = {at, len};
        /* The client lists ranges of any length; the memory may be freed only if this succeeds. */
        while (discard_by(client, &range, 1) == -EAGAIN) usleep(1000);
    }
    if (memfd < 0) {
        if (syscall(SYS_madvise, at, len, MADV_DONTNEED) != 0)
            say("realmem: a discarded range could not be freed\n");
        return;
    }
    if (fallocate(memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (char *)at - base, len) != 0)
        say("realmem: a discarded range could not be punched\n");
}

/* Finds `count` free pages that begin on a border of `align` pages; returns the first, or SIZE_MAX. Under the lock. */
static size_t find(size_t count, size_t align) {
    size_t first = 0;
    while (first + count <= pages) {
        const uint8_t *taken = memrchr(used + first, TAKEN, count);
        if (taken == NULL) return first;
        first = ((size_t)(taken - used) + align) / align * align;
    }
    return SIZE_MAX;
}

/* Takes free pages; `is_zeroed`: they must read as zeros at once. NULL if there are too few. */
static void *take(size_t len, size_t align, int is_zeroed) {
    size_t count = pages_of(len);
    if (align < PAGE) align = PAGE;
    if (len >= UNIT && align < UNIT) align = UNIT;
    int is_dirty = 0;
    pthread_mutex_lock(&lock);
    size_t first = find(count, align / PAGE);
    if (first != SIZE_MAX) {
        is_dirty = memchr(used + first, DIRTY, count) != NULL;
        memset(used + first, TAKEN, count);
    } else if (!is_full_told) {
        is_full_told = 1;
        say("realmem: the memfd is full; the program has memory of its own from now on (raise REALMEM_MIB)\n");
    }
    pthread_mutex_unlock(&lock);
    if (first == SIZE_MAX) return NULL;
    if (is_dirty && is_zeroed) memset(base + first * PAGE, 0, count * PAGE);
    return base + first * PAGE;
}

/* Gives pages back, with the bytes that they have. */
static void give(void *at, size_t len) {
    pthread_mutex_lock(&lock);
    memset(used + ((char *)at - base) / PAGE, DIRTY, pages_of(len));
    pthread_mutex_unlock(&lock);
}

/* Discards all free memory: what a program needed only to build its data is no part of the memory that it works on. */
void realmem_trim(void) {
    pthread_mutex_lock(&lock);
    for (size_t page = 0, end; page < pages; page = end) {
        for (end = page + 1; end < pages && used[end] == used[page];) end++;
        if (used[page] != DIRTY) continue;
        discard(base + page * PAGE, (end - page) * PAGE);
        memset(used + page, FRESH, end - page);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- mappings ---- */

void *mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset) {
    if (is_ours(at) && (flags & MAP_FIXED)) {
        /* An allocator decommits or commits a part of what it has: either way it wants zeros afterwards. */
        discard(at, pages_of(len) * PAGE);
        return at;
    }
    int is_plain = (flags & (MAP_ANONYMOUS | MAP_PRIVATE)) == (MAP_ANONYMOUS | MAP_PRIVATE) && !(flags & MAP_FIXED);
    if (base != NULL && is_plain && !(flags & (MAP_STACK | MAP_GROWSDOWN | MAP_HUGETLB)) && len >= LARGE &&
        (prot & PROT_WRITE) && !(prot & PROT_EXEC)) {
        void *got = take(len, PAGE, 1);
        if (got != NULL) return got;
    }
    /* A JVM reserves its heap, and maps over each part that it commits. */
    if (base != NULL && is_plain && prot == PROT_NONE && len >= RESERVED) {
        void *got = take(len, PAGE, 0);
        if (got != NULL) return got;
    }
    return real_mmap(at, len, prot, flags, fd, offset);
}

void *mmap64(void *at, size_t len, int prot, int flags, int fd, off_t offset) {
    return mmap(at, len, prot, flags, fd, offset);
}

int munmap(void *at, size_t len) {
    if (!is_ours(at)) return syscall(SYS_munmap, at, len);
    give(at, len);
    return 0;
}

int madvise(void *at, size_t len, int advice) {
    if (!is_ours(at)) return syscall(SYS_madvise, at, len, advice);
    if (advice == MADV_DONTNEED || advice == MADV_FREE) discard(at, pages_of(len) * PAGE);
    return 0;
}

int mprotect(void *at, size_t len, int prot) {
    /* A change of protection would split the one mapping of the VM. */
    return is_ours(at) ? 0 : syscall(SYS_mprotect, at, len, prot);
}

void *mremap(void *at, size_t len, size_t new_len, int flags, ...) {
    if (!is_ours(at)) {
        va_list rest;
        va_start(rest, flags);
        void *to = va_arg(rest, void *);
        va_end(rest);
        return (void *)syscall(SYS_mremap, at, len, new_len, flags, to);
    }
    if (new_len <= len) {
        size_t kept = pages_of(new_len) * PAGE;
        if (kept < pages_of(len) * PAGE) munmap((char *)at + kept, len - kept);
        return at;
    }
    if (!(flags & MREMAP_MAYMOVE)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    void *to = mmap(NULL, new_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (to == MAP_FAILED) return to;
    memcpy(to, at, len);
    munmap(at, len);
    return to;
}

/* ---- malloc: large requests only. A program with an allocator of its own calls mmap() for them. ---- */

#ifdef REALMEM_MALLOC

static void *large(size_t len, size_t align) {
    void *at = take(len, align, 1);
    if (at != NULL) length_of[((char *)at - base) / PAGE] = pages_of(len);
    return at;
}

static size_t large_len(const void *at) {
    return length_of[((const char *)at - base) / PAGE] * PAGE;
}

void *malloc(size_t len) {
    void *at = base != NULL && len >= LARGE ? large(len, PAGE) : NULL;
    return at != NULL ? at : __libc_malloc(len);
}

void free(void *at) {
    if (!is_ours(at)) {
        __libc_free(at);
        return;
    }
    size_t len = large_len(at);
    length_of[((char *)at - base) / PAGE] = 0;
    munmap(at, len);
}

void *calloc(size_t count, size_t each) {
    size_t len;
    if (__builtin_mul_overflow(count, each, &len)) {
        errno = ENOMEM;
        return NULL;
    }
    void *at = base != NULL && len >= LARGE ? large(len, PAGE) : NULL;
    return at != NULL ? at : __libc_calloc(count, each);
}

void *realloc(void *at, size_t len) {
    if (!is_ours(at)) {
        /* A small one that becomes large stays the C library's: its old length is not known here. */
        return __libc_realloc(at, len);
    }
    size_t old = large_len(at);
    if (len <= old && len >= LARGE) return at;
    void *to = malloc(len);
    if (to == NULL) return NULL;
    memcpy(to, at, old < len ? old : len);
    free(at);
    return to;
}

void *memalign(size_t align, size_t len) {
    void *at = base != NULL && len >= LARGE ? large(len, align) : NULL;
    return at != NULL ? at : __libc_memalign(align, len);
}

void *aligned_alloc(size_t align, size_t len) {
    return memalign(align, len);
}

int posix_memalign(void **at, size_t align, size_t len) {
    *at = memalign(align, len);
    return *at == NULL ? ENOMEM : 0;
}

size_t malloc_usable_size(void *at) {
    static size_t (*of_libc)(void *);
    if (at != NULL && is_ours(at)) return large_len(at);
    if (of_libc == NULL) of_libc = (size_t (*)(void *))dlsym(RTLD_NEXT, "malloc_usable_size");
    return of_libc(at);
}

#endif

/* ---- start ---- */

static void fail(const char *what, const char *why) {
    fprintf(stderr, "realmem: %s: %s\n", what, why);
    _exit(125);
}

static void attach(const char *path, size_t len) {
    void *library = dlmopen(LM_ID_NEWLM, path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) fail("loading the client", dlerror());
    const ballast_client *(*attach_by)(const struct ballast_config *, const struct ballast_region *, size_t) =
        dlsym(library, "ballast_attach");
    const char *(*last_error)(void) = dlsym(library, "ballast_last_error");
    discard_by = dlsym(library, "ballast_discard");
    if (attach_by == NULL || last_error == NULL || discard_by == NULL) fail(path, "it is no Ballast client");
    struct ballast_config config = {.size = sizeof config,
                                    .name = getenv("REALMEM_NAME"),
                                    .socket = getenv("BALLAST_SOCKET"),
                                    .never_pins = 1};
    struct ballast_region region = {.address = base, .length = len, .fd = memfd};
    client = attach_by(&config, &region, 1);
    if (client == NULL) fail("attaching", last_error());
}

__attribute__((constructor)) static void start(void) {
    const char *mib = getenv("REALMEM_MIB");
    if (mib == NULL) return;
    size_t len = strtoull(mib, NULL, 10) << 20;
    if (len == 0) fail("REALMEM_MIB", "a size in MiB is wanted");
    /* A child that the program starts is not the VM. */
    unsetenv("REALMEM_MIB");
    unsetenv("LD_PRELOAD");
    int is_private = getenv("REALMEM_PRIVATE") != NULL;
    if (!is_private) {
        memfd = memfd_create("realmem", MFD_CLOEXEC);
        if (memfd < 0 || ftruncate(memfd, len) != 0) fail("making the memfd", strerror(errno));
    }
    char *all = real_mmap(NULL, len + UNIT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t maps = len / PAGE;
    uint8_t *map = real_mmap(NULL, maps * 5, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || map == MAP_FAILED) fail("reserving addresses", strerror(errno));
    all = (char *)(((uintptr_t)all + UNIT - 1) & ~(UNIT - 1));
    int flags = is_private ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    if (real_mmap(all, len, PROT_READ | PROT_WRITE, flags | MAP_FIXED, memfd, 0) == MAP_FAILED)
        fail("mapping the memfd", strerror(errno));
    /* As QEMU does with guest RAM: huge pages if shmem_enabled of the host is advise. */
    syscall(SYS_madvise, all, len, MADV_HUGEPAGE);
    length_of = (uint32_t *)map;
    used = map + maps * 4;
    pages = maps;
    const char *path = getenv("REALMEM_CLIENT");
    /* attach() allocates, and its own memory must not be the VM's: `base` is seen by the hooks only afterwards. */
    char *ram = all;
    if (path != NULL) {
        base = ram;
        pages = 0; /* is_ours() is false, take() finds nothing */
        is_full_told = 1;
        attach(path, len);
        is_full_told = 0;
        pages = maps;
    }
    base = ram;
}

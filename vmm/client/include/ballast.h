/* Ballast client: attaches the guest RAM of this VMM process to Ballast.
 *
 * Guest RAM must be mapped MAP_SHARED from a memfd, or a file in a tmpfs or in a hugetlbfs with pages of
 * 2 MiB. Link with -lballast_client.
 * Functions that return int return 0 or a negative errno. After an error, ballast_last_error() returns a text for the
 * operator. Any thread may call any function. The library adds one thread, "ballast-client", to the process.
 *
 * There is no detach: an attachment ends with the process. Free memory only as ballast_discard() describes. Read and
 * write RAM only through its mapping: read(2) on the file returns zeros where pages are far.
 */
#ifndef BALLAST_H
#define BALLAST_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ballast_client ballast_client;

struct ballast_config {
    size_t size;        /* sizeof(struct ballast_config) */
    const char *name;   /* UTF-8, 1 to 255 bytes; NULL: "vm-PID" */
    const char *socket; /* NULL: $BALLAST_SOCKET, else /run/ballast/attach.sock */
    uint64_t limit;     /* limit of its DRAM in bytes; 0: no limit */
    const char *pinned; /* reason why no page may ever be reclaimed; NULL: pages may be reclaimed */
    int never_pins;     /* 0 (always safe): the kernel or a device may write to RAM without the page table for some
    * time, as with O_DIRECT, vhost, and a plain read() from FUSE, virtiofs, 9p or CIFS that
    * bypasses the page cache. 1: a promise that nothing does so before ballast_may_pin(). Then
    * pages are reclaimed sooner where the engine cannot find out who holds a page */
};

struct ballast_region {
    void *address;        /* the address of its mapping in this process */
    uint64_t length;      /* bytes, whole pages */
    int fd;               /* its file; the callee duplicates it */
    uint64_t file_offset; /* offset of the mapping in the file */
};

/* A piece of a file that is mapped as guest RAM. */
struct ballast_extent {
    int fd;               /* the file; the callee duplicates it */
    uint64_t file_offset; /* offset of the piece in the file, whole pages */
    uint64_t length;      /* bytes, whole pages */
};

#define BALLAST_UNKNOWN UINT64_MAX

/* A contiguous range of guest RAM. It consists of pieces of files that are mapped one after the other. */
struct ballast_ram {
    size_t size;                          /* sizeof(struct ballast_ram) */
    void *address;                        /* the address of the first piece */
    const struct ballast_extent *extents; /* the pieces, by address; they do not overlap in a file */
    size_t extent_count;                  /* at most 1024 in all RAM of a process */
    uint64_t guest_address;               /* guest-physical address of its first byte, or BALLAST_UNKNOWN */
};

/* A part of a region, and its guest-physical address. */
struct ballast_guest_range {
    uint64_t offset;        /* its offset in the region, whole pages */
    uint64_t guest_address; /* its guest-physical address */
    uint64_t length;        /* bytes, whole pages */
};

struct ballast_range {
    void *address;
    uint64_t length;
};

/* Attach this process with all of its RAM. config may be NULL. Returns NULL on failure, and changes nothing then. */
const ballast_client *ballast_attach(const struct ballast_config *config, const struct ballast_region *regions,
                                     size_t count);

/* Attach like ballast_attach(), with RAM that has several pieces or a known guest-physical address. */
const ballast_client *ballast_attach_ram(const struct ballast_config *config, const struct ballast_ram *ram,
                                         size_t count);

/* Add hot-plugged RAM. Call this before the guest can use it. Waits some seconds while far pages of an earlier VM are
* written back into this file; then it returns -EAGAIN, and the RAM must not be used, because it may read as zeros.
* After another error the RAM is not managed; call ballast_remove_region() before unmapping it all the same, because a
* keeper that did not answer (-ETIMEDOUT) may know it. */
int ballast_add_region(const ballast_client *client, const struct ballast_region *region);

/* Add hot-plugged RAM that has several pieces or a known guest-physical address. */
int ballast_add_ram(const ballast_client *client, const struct ballast_ram *ram);

/* Set the guest-physical ranges of the region that begins at address, at most 8. This is for a VMM that learns them
* after the attach, or that has several (around a PCI hole). It replaces earlier ranges. count 0: not known. */
int ballast_set_guest_ranges(const ballast_client *client, void *address, const struct ballast_guest_range *ranges,
                             size_t count);

/* Remove RAM that is about to be unplugged. Call this before unmapping it, then unmap it whatever this returns. */
int ballast_remove_region(const ballast_client *client, void *address);

/* Announce that the VMM is about to free this memory (balloon, free page reporting, virtio-mem); at most 1024 ranges.
* 0: free it now (MADV_REMOVE or fallocate(FALLOC_FL_PUNCH_HOLE)). -EAGAIN: no engine took the request; keep the
* memory. -EIO: the engine had an error; keep the memory, of which some may be zero now. */
int ballast_discard(const ballast_client *client, const struct ballast_range *ranges, size_t count);

/* Stop all reclaim (a device is about to pin RAM, another process is about to map it, ...). After 0, it has stopped. */
int ballast_pin(const ballast_client *client, const char *reason);

/* Restore all pages before this process passes its RAM on, to a program that it executes or to a VMM that opens the
* file next. 0: every page is in its file, and none is reclaimed any more. Otherwise do not pass it on: far pages would
* be zeros. */
int ballast_bring_back(const ballast_client *client, const char *reason);

/* End the promise of never_pins = 1. Call this before the first O_DIRECT read into RAM, vhost device and so on, and
* continue only after 0. Further calls cost nothing. */
int ballast_may_pin(const ballast_client *client);

/* Returns the reason of the last failure on this thread. The text is valid until the next failure on this thread. */
const char *ballast_last_error(void);

#ifdef __cplusplus
}
#endif
#endif

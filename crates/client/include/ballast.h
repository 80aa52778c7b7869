/* Ballast client: let Ballast manage the guest RAM of this VMM process.
 *
 * Guest RAM must be mapped MAP_SHARED from a memfd, or a file in a tmpfs or in a hugetlbfs with pages of
 * 2 MiB. Link with -lballast_client.
 * Functions that return int return 0 or a negative errno; ballast_last_error() then has a sentence for the operator.
 * All functions may be called from any thread. One thread, "ballast-client", is added to the process.
 *
 * There is no detach: an attachment ends with the process. Memory must be freed only as ballast_discard() describes.
 * RAM must be read and written through its mapping only: read(2) on the file would see holes where pages are far.
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
    const char *name;   /* letters, digits, '.', '_', '-'; NULL: "vm-PID" */
    const char *socket; /* NULL: $BALLAST_SOCKET, else /run/ballast/attach.sock */
    uint64_t limit;     /* most DRAM in bytes; 0: no limit */
    const char *pinned; /* why no page may ever be reclaimed; NULL: reclaim is fine */
    int never_pins;     /* 0 (always safe): the kernel or a device may write to RAM past the page table for a while, as
                         * with O_DIRECT, vhost, and a plain read() from FUSE, virtiofs, 9p or CIFS past the page
                         * cache. 1: a promise that nothing does before ballast_may_pin(); where the engine cannot see
                         * who holds a page, pages are then reclaimed sooner */
};

struct ballast_region {
    void *address;        /* where this process has it mapped */
    uint64_t length;      /* bytes, whole pages */
    int fd;               /* its file; duplicated by the callee */
    uint64_t file_offset; /* where the mapping begins in the file */
};

/* A piece of a file that is mapped as guest RAM. */
struct ballast_extent {
    int fd;               /* the file; duplicated by the callee */
    uint64_t file_offset; /* where the piece begins in the file, whole pages */
    uint64_t length;      /* bytes, whole pages */
};

#define BALLAST_UNKNOWN UINT64_MAX

/* A contiguous range of guest RAM, made of pieces of files that are mapped one after the other. */
struct ballast_ram {
    size_t size;                          /* sizeof(struct ballast_ram) */
    void *address;                        /* where the first piece is mapped */
    const struct ballast_extent *extents; /* the pieces, in the order of their addresses; none overlap in a file */
    size_t extent_count;                  /* at most 1024 in all RAM of a process */
    uint64_t guest_address;               /* where the guest sees the first byte, or BALLAST_UNKNOWN */
};

/* A part of a region, and where the guest sees it. */
struct ballast_guest_range {
    uint64_t offset;        /* where it begins in the region, whole pages */
    uint64_t guest_address; /* its guest-physical address */
    uint64_t length;        /* bytes, whole pages */
};

struct ballast_range {
    void *address;
    uint64_t length;
};

/* Attach with all RAM there is. config may be NULL. NULL on failure; nothing was changed then. */
const ballast_client *ballast_attach(const struct ballast_config *config, const struct ballast_region *regions,
                                     size_t count);

/* The same with RAM that is made of several pieces, or whose guest-physical address is known. */
const ballast_client *ballast_attach_ram(const struct ballast_config *config, const struct ballast_ram *ram,
                                         size_t count);

/* RAM was hot-plugged: call before the guest can see it. Waits while far pages of an earlier VM are written back into
 * this file. */
int ballast_add_region(const ballast_client *client, const struct ballast_region *region);

/* The same, as for ballast_attach_ram(). */
int ballast_add_ram(const ballast_client *client, const struct ballast_ram *ram);

/* Where the guest sees the region that begins at address, for a VMM that knows only later, or shows it in several
 * places (around a PCI hole); at most 8 ranges. It replaces what was said before. count 0: not known. */
int ballast_set_guest_ranges(const ballast_client *client, void *address, const struct ballast_guest_range *ranges,
                             size_t count);

/* RAM is about to be unplugged: call before unmapping it; unmap afterwards, whatever it returns. */
int ballast_remove_region(const ballast_client *client, void *address);

/* The VMM is about to free this memory (balloon, free page reporting, virtio-mem); at most 1024 ranges.
 * 0: free it now (MADV_REMOVE or fallocate(FALLOC_FL_PUNCH_HOLE)). -EAGAIN: nobody took note; keep the memory.
 * -EIO: the engine met an error; keep the memory, of which some may read as zeros now. */
int ballast_discard(const ballast_client *client, const struct ballast_range *ranges, size_t count);

/* From 0 on no page is taken any more (devices are about to pin RAM, another process is about to map it, ...). */
int ballast_pin(const ballast_client *client, const char *reason);

/* This process is about to hand its RAM on: to a program that it executes, or to a VMM that opens the file next.
 * 0: every page is in its file, and none is reclaimed any more. Otherwise do not go on: far pages would be zeros. */
int ballast_bring_back(const ballast_client *client, const char *reason);

/* After never_pins = 1: call before the first O_DIRECT read into RAM, vhost device, and so on; go on only after 0. More
 * calls cost nothing. */
int ballast_may_pin(const ballast_client *client);

/* Why the last call on this thread failed. Valid until the next failing call on this thread. */
const char *ballast_last_error(void);

#ifdef __cplusplus
}
#endif
#endif

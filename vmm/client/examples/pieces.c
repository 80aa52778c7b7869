/* Guest RAM in pieces: one region of two pieces of one file, out of order, and a piece of another file between them.
 *
 *   cc pieces.c -lballast_client -o pieces && ./pieces
 *
 * check    read every page and compare it with the written contents
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ballast.h"

enum { PAGE = 4096, PIECE = 1 << 20, PIECES = 3, RAM = PIECES * PIECE };

int main(void) {
    int pool = memfd_create("pool", MFD_CLOEXEC), own = memfd_create("own", MFD_CLOEXEC);
    if (pool < 0 || own < 0 || ftruncate(pool, 4 * PIECE) != 0 || ftruncate(own, PIECE) != 0) {
        perror("memfd");
        return 1;
    }
    unsigned char *ram = mmap(NULL, RAM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const struct ballast_extent extents[PIECES] = {
        {.fd = pool, .file_offset = 3 * PIECE, .length = PIECE},
        {.fd = own, .length = PIECE},
        {.fd = pool, .file_offset = PIECE, .length = PIECE},
    };
    for (size_t at = 0; at < PIECES; at++) {
        const struct ballast_extent *piece = &extents[at];
        if (mmap(ram + at * PIECE, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, piece->fd,
                 (off_t)piece->file_offset) == MAP_FAILED) {
            perror("mmap");
            return 1;
        }
    }
    for (size_t page = 0; page < RAM / PAGE; page++)
        memset(ram + page * PAGE, (int)(page % 251) + 1, PAGE);

    struct ballast_config config = {.size = sizeof config, .name = "pieces-c"};
    struct ballast_ram one = {
        .size = sizeof one, .address = ram, .extents = extents, .extent_count = PIECES,
        .guest_address = BALLAST_UNKNOWN};
    const ballast_client *client = ballast_attach_ram(&config, &one, 1);
    if (client == NULL) {
        fprintf(stderr, "%s\n", ballast_last_error());
        return 1;
    }
    /* The guest-physical address of the first piece is 0. The others are above 4 GiB. */
    const struct ballast_guest_range seen[] = {
        {.offset = 0, .guest_address = 0, .length = PIECE},
        {.offset = PIECE, .guest_address = 1ULL << 32, .length = 2 * PIECE},
    };
    if (ballast_set_guest_ranges(client, ram, seen, 2) != 0) {
        fprintf(stderr, "%s\n", ballast_last_error());
        return 1;
    }
    puts("attached");
    fflush(stdout);

    char line[64];
    while (fgets(line, sizeof line, stdin) != NULL) {
        for (size_t page = 0; page < RAM / PAGE; page++) {
            for (size_t byte = 0; byte < PAGE; byte++) {
                if (ram[page * PAGE + byte] != (unsigned char)(page % 251 + 1)) {
                    printf("wrong: page %zu\n", page);
                    return 1;
                }
            }
        }
        puts("right");
        fflush(stdout);
    }
    return 0;
}

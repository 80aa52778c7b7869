/* A minimal VMM: it attaches 4 MiB of "guest RAM" to Ballast, and reads commands from standard input.
 *
 *   cc embed.c -lballast_client -o embed && ./embed
 *
 * check    read every page and compare it with the written contents
 * balloon  free the first 1 MiB, as a balloon must
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ballast.h"

enum { PAGE = 4096, RAM = 4 << 20, BALLOON = 1 << 20 };

int main(void) {
    int fd = memfd_create("guest-ram", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, RAM) != 0) {
        perror("memfd");
        return 1;
    }
    unsigned char *ram = mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ram == MAP_FAILED) {
        perror("mmap");
        return 1;
    }
    for (size_t page = 0; page < RAM / PAGE; page++)
        memset(ram + page * PAGE, (int)(page % 251) + 1, PAGE);

    struct ballast_config config = {.size = sizeof config, .name = "embed-c", .limit = 2 << 20};
    struct ballast_region region = {.address = ram, .length = RAM, .fd = fd};
    const ballast_client *client = ballast_attach(&config, &region, 1);
    if (client == NULL) {
        fprintf(stderr, "%s\n", ballast_last_error());
        return 1;
    }
    puts("attached");
    fflush(stdout);

    size_t freed = 0;
    char line[64];
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (strcmp(line, "check\n") == 0) {
            for (size_t page = 0; page < RAM / PAGE; page++) {
                unsigned char want = page * PAGE < freed ? 0 : (unsigned char)(page % 251 + 1);
                for (size_t byte = 0; byte < PAGE; byte++) {
                    if (ram[page * PAGE + byte] != want) {
                        printf("wrong: page %zu\n", page);
                        return 1;
                    }
                }
            }
            puts("right");
        } else if (strcmp(line, "balloon\n") == 0) {
            struct ballast_range range = {.address = ram, .length = BALLOON};
            int answer = ballast_discard(client, &range, 1);
            if (answer == 0 && madvise(ram, BALLOON, MADV_REMOVE) == 0) {
                freed = BALLOON;
                puts("freed");
            } else {
                /* -EAGAIN: no engine took the request. The memory is kept, with its contents. */
                printf("kept: %s\n", ballast_last_error());
            }
        }
        fflush(stdout);
    }
    return 0;
}

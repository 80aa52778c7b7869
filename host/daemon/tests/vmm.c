/* A VMM that does to itself what VMMs do: it executes itself and keeps its RAM, or leaves a child in its own memory.
 *
 *     vmm ram FILE PAGES      maps RAM (FILE is a path, or "memfd"), writes a word of its own into each page, then does
 *                             what lines on standard input say
 *     vmm next FILE PAGES     the same with RAM that is there already: FILE is a path or the number of a descriptor
 *
 * Every deed ends in a line on standard output. "exec..." go on as "vmm next". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096 };

static char *ram, *pages_word, file[256];
static unsigned long pages;
static pid_t child;
static int ram_fd;
static char *again;

static void say(const char *text) {
    puts(text);
    fflush(stdout);
}

static unsigned long mark(unsigned long page) { return page * 7919 + 1; }

static unsigned long *word(unsigned long page) { return (unsigned long *)(ram + page * PAGE); }

/* As QEMU's async-teardown: a process of its own in the same memory, which waits for the VMM's end. */
static int wait_for_the_end(void *unused) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
        pause();
    return unused != NULL;
}

/* Past every hook: an instruction of its own. */
static long kernel(long number, long a, long b, long c, long d, long e, long f) {
    register long fourth __asm__("r10") = d, fifth __asm__("r8") = e, sixth __asm__("r9") = f;
    long answer;
    __asm__ volatile("syscall"
                     : "=a"(answer)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
                     : "rcx", "r11", "memory");
    return answer;
}

/* Wrong words in a second mapping of the first `count` pages. */
static void compare(unsigned long count) {
    unsigned long wrong = 0;
    for (unsigned long page = 0; page < count; page++)
        wrong += *(unsigned long *)(again + page * PAGE) != mark(page);
    printf("wrong %lu\n", wrong);
    fflush(stdout);
}

/* Map RAM a second time, and look at it. */
static void map_again(const char *how) {
    int prot = PROT_READ, flags = MAP_SHARED, both = PROT_READ | PROT_WRITE, is_small = !strcmp(how, "small");
    unsigned long count = is_small ? 256 : pages;
    if (!strcmp(how, "verify"))
        return compare(pages);
    if (!strcmp(how, "unmap"))
        return say(munmap(again, pages * PAGE) ? strerrorname_np(errno) : "ok");
    if (!strcmp(how, "unseen")) {
        again = (char *)kernel(SYS_mmap, 0, pages * PAGE, PROT_READ, MAP_SHARED, ram_fd, 0);
        return say((unsigned long)again > -4096UL ? "not mapped" : "ok");
    }
    if (!strcmp(how, "private")) flags = MAP_PRIVATE;
    if (!strcmp(how, "later")) prot = PROT_NONE;
    if (!strcmp(how, "whole") || is_small) prot = both;
    again = mmap(NULL, count * PAGE, prot, flags, ram_fd, 0);
    if (again == MAP_FAILED)
        return say(strerrorname_np(errno));
    if (prot == PROT_NONE && mprotect(again, count * PAGE, both))
        return say("no mprotect");
    /* A write to a page that was far, past its word. */
    for (unsigned long page = 0; is_small && page < count; page++)
        again[page * PAGE + 2048] = 'W';
    for (unsigned long page = 0; is_small && page < count; page++)
        if (ram[page * PAGE + 2048] != 'W')
            return say("the guest does not see it");
    compare(count);
}

static void deed(const char *what) {
    char *words[] = {"vmm", "next", file, pages_word, NULL};
    extern char **environ;
    if (!strcmp(what, "verify")) {
        unsigned long wrong = 0;
        for (unsigned long page = 0; page < pages; page++)
            wrong += *word(page) != mark(page);
        printf("wrong %lu\n", wrong);
        fflush(stdout);
        return;
    }
    if (!strncmp(what, "again-", 6))
        return map_again(what + 6);
    if (!strcmp(what, "munmap")) {
        say(munmap(ram, pages * PAGE) ? "not unmapped" : "unmapped");
        return;
    }
    if (!strcmp(what, "clone")) {
        static char stack[64 << 10];
        child = clone(wait_for_the_end, stack + sizeof stack, CLONE_VM, NULL);
        return say(child > 0 ? "ok" : strerrorname_np(errno));
    }
    if (!strcmp(what, "unclone")) {
        kill(child, SIGKILL);
        return say(waitpid(child, NULL, __WCLONE) == child ? "ok" : strerrorname_np(errno));
    }
    if (!strcmp(what, "vfork")) {
        char *nothing[] = {"true", NULL};
        pid_t other = vfork();
        if (other == 0) {
            execve("/bin/true", nothing, environ);
            _exit(1);
        }
        int status = 1;
        return say(waitpid(other, &status, 0) == other && status == 0 ? "ok" : "wrong");
    }
    if (!strcmp(what, "vfork-execv")) {
        char *nothing[] = {"true", NULL};
        pid_t other = vfork();
        if (other == 0) {
            execv("/bin/true", nothing);
            _exit(1);
        }
        int status = 1;
        return say(waitpid(other, &status, 0) == other && status == 0 ? "ok" : "wrong");
    }
    int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    char path[256];
    path[readlink("/proc/self/exe", path, sizeof path - 1)] = 0;
    if (!strcmp(what, "execv")) execv(path, words);
    if (!strcmp(what, "execve")) execve(path, words, environ);
    if (!strcmp(what, "execvp")) execvp(path, words);
    if (!strcmp(what, "execvpe")) execvpe(path, words, environ);
    if (!strcmp(what, "fexecve")) fexecve(self, words, environ);
    if (!strcmp(what, "execveat")) execveat(self, "", words, environ, AT_EMPTY_PATH);
    if (!strcmp(what, "execv-nowhere")) execv("/nowhere", words);
    if (!strcmp(what, "raw")) kernel(SYS_execve, (long)path, (long)words, (long)environ, 0, 0, 0);
    say(strerrorname_np(errno));
    close(self);
}

int main(int count, char **words) {
    if (count < 4)
        return 2;
    int is_new = !strcmp(words[1], "ram"), fd = -1;
    pages_word = words[3];
    pages = strtoul(words[3], NULL, 10);
    if (!strcmp(words[2], "memfd")) {
        fd = memfd_create("guest-ram", 0);
        snprintf(file, sizeof file, "%d", fd);
    } else {
        snprintf(file, sizeof file, "%s", words[2]);
        fd = file[0] == '/' ? open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : atoi(file);
    }
    if (fd < 0 || (is_new && ftruncate(fd, pages * PAGE) != 0))
        abort();
    ram_fd = fd;
    ram = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ram == MAP_FAILED)
        abort();
    for (unsigned long page = 0; is_new && page < pages; page++)
        *word(page) = mark(page);
    say(is_new ? "ready" : "next");
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        deed(line);
    }
    return 0;
}

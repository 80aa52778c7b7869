/* A program that acts like a VMM: on command it makes the calls that the preload library interposes. Each line on
* standard input is one command. The output for each is "ok", "wrong", or the name of the errno. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, MIB2 = 2 << 20, RAM = 2 * MIB2 };

static int ram_fd;
static char *ram;

static char *map_new(int *fd_out) {
    int fd = memfd_create("guest-ram", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, RAM) != 0)
        abort();
    char *map = mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (map == MAP_FAILED)
        abort();
    if (fd_out)
        *fd_out = fd;
    else
        close(fd);
    return map;
}

/* Map RAM as QEMU does. Like VMMs, it has a guard page on either side. */
static char *map_ram(int *fd_out) {
    char *reserved = mmap(NULL, RAM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = memfd_create("guest-ram", MFD_CLOEXEC);
    if (reserved == MAP_FAILED || fd < 0 || ftruncate(fd, RAM) != 0)
        abort();
    char *map = mmap(reserved + PAGE, RAM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (map == MAP_FAILED)
        abort();
    *fd_out = fd;
    return map;
}

/* Write three registers of the vCPU of kvm.c, the second of which is MSR_KVM_ASYNC_PF_EN, and run it three times. */
static int do_reset(int is_first, unsigned enabled, const char *expected) {
    struct { unsigned count, none; struct { unsigned index, none; unsigned long data; } all[3]; } msrs = {
        .count = 3, .all = {{0x10, 0, 5}, {0x4B564D02, 0, enabled}, {0x20, 0, 6}}};
    char *list;
    if (ioctl(77, 1, &is_first) != 0 || ioctl(77, 0x4008AE89, &msrs) != 3) return -1;
    if (ioctl(77, 0xAE80, 0) != -1 || errno != EINTR) return 1;
    if (ioctl(77, 0xAE80, 0) != 0 || ioctl(77, 0xAE80, 0) != 0 || ioctl(77, 2, &list) != 0) return 1;
    return strcmp(list, expected) != 0;
}

static int send_ram(void) {
    int pair[2], answer;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
        abort();
    union { struct cmsghdr header; char space[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec byte = {.iov_base = "x", .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &byte, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    memset(&control, 0, sizeof control);
    control.header.cmsg_level = SOL_SOCKET;
    control.header.cmsg_type = SCM_RIGHTS;
    control.header.cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(&control.header), &ram_fd, sizeof(int));
    answer = sendmsg(pair[0], &message, 0) == 1 ? 0 : -1;
    int error = errno;
    close(pair[0]);
    close(pair[1]);
    errno = error;
    return answer;
}

/* Misbehave: map and unmap RAM from many threads, over itself, and twice. */
static void *storm(void *unused) {
    for (int i = 0; i < 25; i++) {
        char *map = map_new(NULL);
        map[PAGE] = 1;
        if (i % 2 && mmap(map, RAM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != map)
            abort();
        munmap(map, RAM);
        munmap(map, 0);
    }
    return unused;
}

static int do_storm(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, storm, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

static int do_fork(void) {
    pid_t child = fork();
    if (child == 0) {
        munmap(ram, RAM);
        map_new(NULL);
        fallocate(ram_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 0); /* EINVAL: must not reach the engine */
        _exit(0);
    }
    int status;
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : -1;
}

/* A child that the C library does not know of, as a sandbox makes it. */
static int do_clone(void) {
    pid_t child = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (child == 0) {
        int punched = fallocate(ram_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE);
        int sought = lseek(ram_fd, 0, SEEK_DATA) == PAGE;
        _exit(punched == 0 && sought ? 0 : 1);
    }
    int status;
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : -1;
}

/* Start a program that has QEMU's name among its words, as a program that starts VMs does. */
static int do_spawn(int search, char **variables) {
    char *words[] = {"sh", "-c", "exit 0", "qemu-system-x86_64", NULL};
    char *file = getenv("SPAWNS"); /* any name may be its first word */
    if (file)
        words[3] = NULL;
    pid_t child;
    int status;
    errno = search ? posix_spawnp(&child, "sh", NULL, NULL, words, variables)
                   : posix_spawn(&child, file ? file : "/bin/sh", NULL, NULL, words, variables);
    if (errno != 0)
        return -1;
    return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
}

/* Check that calls that fail by themselves keep their errno. */
static int do_errno(void) {
    errno = 0;
    if (mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_SHARED, 9999, 0) != MAP_FAILED || errno != EBADF)
        return 1;
    if (fallocate(9999, 0, 0, PAGE) != -1 || errno != EBADF)
        return 1;
    if (munmap((void *)1, PAGE) != -1 || errno != EINVAL)
        return 1;
    if (ioctl(9999, 0x3B64, 0) != -1 || errno != EBADF)
        return 1;
    errno = 77;
    map_new(NULL);
    return errno == 77 ? 0 : 1;
}

/* Plug RAM into a reservation, as QEMU does. -1 if that failed and the reservation is there as before. */
static int do_plug(void) {
    char *reserved = mmap(NULL, RAM + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = memfd_create("guest-ram", MFD_CLOEXEC);
    if (reserved == MAP_FAILED || fd < 0 || ftruncate(fd, RAM) != 0)
        abort();
    char *map = mmap(reserved + PAGE, RAM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    int error = errno;
    int pair[2];
    if (pipe(pair) != 0)
        abort();
    int readable = write(pair[1], reserved + PAGE, 1) == 1;
    char *again = mmap(reserved + PAGE, RAM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    int free = again != MAP_FAILED;
    close(pair[0]);
    close(pair[1]);
    close(fd);
    munmap(reserved, RAM + 2 * PAGE);
    if (map != MAP_FAILED || readable || free)
        return 1;
    errno = error;
    return -1;
}

static int deed(const char *what) {
    int punch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (!strcmp(what, "punch")) return fallocate(ram_fd, punch, 0, 2 * PAGE);
    if (!strcmp(what, "punch-odd")) return fallocate(ram_fd, punch, 100, PAGE);
    if (!strcmp(what, "fill")) return fallocate(ram_fd, 0, 0, PAGE);
    if (!strcmp(what, "fill-posix")) return (errno = posix_fallocate(ram_fd, 0, PAGE)) ? -1 : 0;
    if (!strcmp(what, "remove")) return madvise(ram + 4 * PAGE, PAGE, MADV_REMOVE);
    if (!strcmp(what, "dontneed")) return madvise(ram + 4 * PAGE, PAGE, MADV_DONTNEED);
    if (!strcmp(what, "mlock")) return mlock(ram, PAGE);
    if (!strcmp(what, "vfio")) return ioctl(-1, 0x3B71, 0);
    if (!strcmp(what, "udmabuf")) return ioctl(-1, 0x40187542, 0);
    if (!strcmp(what, "send")) return send_ram();
    if (!strcmp(what, "mremap")) return mremap(ram, RAM, 2 * RAM, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "mremap-copy")) return mremap(ram, 0, RAM, MREMAP_MAYMOVE) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "unmap-odd")) return munmap(ram + 100, RAM);
    if (!strcmp(what, "over-nothing"))
        return mmap(ram, RAM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, -1, 0) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "twice"))
        return mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_SHARED, ram_fd, 0) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "again-read"))
        return mmap(NULL, PAGE, PROT_READ, MAP_SHARED, ram_fd, PAGE) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "again-private"))
        return mmap(NULL, RAM, PROT_READ | PROT_WRITE, MAP_PRIVATE, ram_fd, 0) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "again-none")) return mmap(NULL, RAM, PROT_NONE, MAP_SHARED, ram_fd, 0) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "in-place"))
        return mmap(ram, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, ram_fd, 0) == MAP_FAILED ? -1 : 0;
    if (!strcmp(what, "sev")) return ioctl(-1, 0x8010AEBB, 0);
    if (!strcmp(what, "run")) return ioctl(-1, 0xAE80, 0);
    if (!strcmp(what, "reset-first")) return do_reset(1, 0, "10=5 20=6 run run 4b564d02=0 run ");
    if (!strcmp(what, "reset-other")) return do_reset(0, 0, "10=5 4b564d02=0 20=6 run run run ");
    if (!strcmp(what, "reset-on")) return do_reset(1, 1, "10=5 4b564d02=1 20=6 run run run ");
    if (!strcmp(what, "spawn")) return do_spawn(0, environ);
    if (!strcmp(what, "spawnp")) return do_spawn(1, environ);
    if (!strcmp(what, "spawn-bare")) return do_spawn(0, (char *[]){NULL});
    if (!strcmp(what, "spawnp-bare")) return do_spawn(1, (char *[]){NULL});
    if (!strcmp(what, "data")) return lseek(ram_fd, 0, SEEK_DATA) == 0 ? 0 : -1;
    if (!strcmp(what, "hole-after")) return lseek(ram_fd, 0, SEEK_HOLE) == RAM ? 0 : -1;
    if (!strcmp(what, "end")) return lseek(ram_fd, 0, SEEK_END) == RAM ? 0 : -1;
    if (!strcmp(what, "pread")) return pread(ram_fd, ram, PAGE, 0) == PAGE ? 0 : -1;
    if (!strcmp(what, "sendfile")) return sendfile(1, ram_fd, &(off_t){0}, PAGE) == PAGE ? 0 : -1;
    if (!strcmp(what, "copy")) return copy_file_range(ram_fd, &(off_t){0}, 1, NULL, PAGE, 0) == PAGE ? 0 : -1;
    if (!strcmp(what, "clone")) return do_clone();
    if (!strcmp(what, "buffer")) return map_new(NULL)[PAGE];
    if (!strcmp(what, "plug")) return map_ram(&(int){0})[PAGE];
    if (!strcmp(what, "hole")) return munmap(ram + 8 * PAGE, PAGE);
    if (!strcmp(what, "unmap")) return munmap(ram - PAGE, RAM + 2 * PAGE);
    if (!strcmp(what, "fork")) return do_fork();
    if (!strcmp(what, "storm")) return do_storm();
    if (!strcmp(what, "errno")) return do_errno();
    if (!strcmp(what, "plug-or-not")) return do_plug();
    if (!strcmp(what, "exec")) return system("test -z \"$LD_PRELOAD\"") == 0 ? 0 : -1;
    errno = ENOSYS;
    return -1;
}

static void tell(int answer) {
    puts(answer == 0 ? "ok" : answer > 0 ? "wrong" : strerrorname_np(errno));
    fflush(stdout);
}

int main(int count, char **words) {
    if (count > 1)
        tell(deed(words[1]));
    ram = map_ram(&ram_fd);
    memset(ram, 7, RAM);
    puts("ready");
    fflush(stdout);
    char line[64];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        errno = 0;
        tell(deed(line));
    }
    return 0;
}

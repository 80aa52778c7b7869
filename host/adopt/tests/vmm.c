/* A VMM as far as adopting knows one: a program of that name with guest RAM of the size that its command line says.
 * Options: -m MiB[,...], -shared, -split (shared, and mapped in two parts, of which the upper is the first half of the
 * file; its first half is a mapping of its own). It does what standard input says, line by line, and replies with one
 * line each. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <signal.h>
#include <unistd.h>

static uint64_t word(size_t at)
{
	uint64_t x = at * 0x9e3779b97f4a7c15ull + 1;
	x ^= x >> 29;
	x *= 0xbf58476d1ce4e5b9ull;
	return x ^ (x >> 32);
}

/* Guest RAM: one mapping, or two. */
static char *part[2];
static size_t part_len;

static char *byte(size_t at)
{
	return part[at / part_len] + at % part_len;
}

int main(int argc, char **argv)
{
	size_t len = 0;
	int shared = 0, split = 0;
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "-m") && i + 1 < argc)
			len = strtoull(argv[++i], 0, 10) << 20;
		else if (!strcmp(argv[i], "-shared"))
			shared = 1;
		else if (!strcmp(argv[i], "-split"))
			shared = split = 1;
	}
	int fd = -1;
	if (shared && ((fd = memfd_create("ram", 0)) < 0 || ftruncate(fd, len)))
		return 1;
	part_len = split ? len / 2 : len;
	if (split) {
		char *room = mmap(0, 2 * len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (room == MAP_FAILED)
			return 1;
		part[0] = room + len;
		part[1] = room;
	}
	for (int i = 0; i <= split; i++) {
		int flags = (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | (split ? MAP_FIXED : 0);
		part[i] = mmap(part[i], part_len, PROT_READ | PROT_WRITE, flags, fd, i * part_len);
		if (part[i] == MAP_FAILED)
			return 1;
	}
	if (split && madvise(part[0], part_len / 2, MADV_DONTDUMP))
		return 1;
	char line[64];
	puts(getenv("AGAIN") ? "0" : "ready");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		size_t wrong = 0, first = 0, last = 0;
		if (sscanf(line, "fill %zu", &last) == 1) {
			/* The second half of each page is zeros. */
			for (size_t at = 0; at < last << 20; at += at % 4096 < 2040 ? 8 : 2056)
				*(volatile uint64_t *)byte(at) = word(at);
		} else if (sscanf(line, "check %zu", &last) == 1) {
			for (size_t at = 0; at < last << 20; at += 8)
				wrong += *(volatile uint64_t *)byte(at) != (at % 4096 < 2048 ? word(at) : 0);
		} else if (sscanf(line, "touch %zu %zu", &first, &last) == 2) {
			for (size_t at = first << 20; at < last << 20; at += 4096)
				(void)*(volatile char *)byte(at);
		} else if (sscanf(line, "plug %zu", &last) == 1) {
			/* A DIMM, as QEMU maps one: touched, with a page behind it that nobody may touch. */
			last <<= 20;
			char *dimm = mmap(0, last + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			wrong = dimm == MAP_FAILED || mprotect(dimm, last, PROT_READ | PROT_WRITE);
			if (!wrong)
				memset(dimm, 1, last);
		} else if (sscanf(line, "share %zu", &last) == 1) {
			/* Another process has the first MiB, too, so the kernel keeps them in memory. */
			if (!fork()) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				for (;;)
					pause();
			}
			for (size_t at = last << 20; at < len; at += 4096)
				*(volatile char *)byte(at) = *(volatile char *)byte(at);
		} else if (!strncmp(line, "lock", 4)) {
			wrong = mlock(part[0], part_len) != 0;
		} else if (!strncmp(line, "exec", 4)) {
			wrong = setenv("AGAIN", "1", 1) || execv("/proc/self/exe", argv);
		} else if (!strncmp(line, "hide", 4)) {
			wrong = mprotect(part[0], part_len, PROT_NONE) != 0;
		} else if (!strncmp(line, "show", 4)) {
			wrong = mprotect(part[0], part_len, PROT_READ | PROT_WRITE) != 0;
		}
		printf("%zu\n", wrong);
		fflush(stdout);
	}
	return 0;
}

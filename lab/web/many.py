#!/usr/bin/env python3
"""The page of `ballast web` and the metrics with hundreds of VMs: adopted processes of the bench that do nothing.

Usage: many.py PROGRAMS PICTURES [VMS [SECONDS]]
  PROGRAMS  the directory of ballast, ballastd and ballast-bench, release builds
  PICTURES  a directory for a screenshot
  VMS       500; each has 64 MiB, of which it uses a page in 512
  SECONDS   60: how long the page stays open

Needs root, Chromium and Python's standard library. Prints one line for each figure, `name value`.
"""
import json, os, shutil, socket, subprocess, sys, tempfile, time

RAM = 64 << 20


def ask(path, target):
    with socket.socket(socket.AF_UNIX) as api:
        api.connect(path)
        api.sendall(f"GET {target} HTTP/1.1\r\nHost: ballast\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: api.recv(1 << 16), b""))
    return answer.partition(b"\r\n\r\n")[2]


def main():
    programs, pictures = os.path.abspath(sys.argv[1]), sys.argv[2]
    count, seconds = int((sys.argv[3:] or ["500"])[0]), (sys.argv[4:] or ["60"])[0]
    children = []
    with tempfile.TemporaryDirectory() as home:
        def start(*words, **how):
            children.append(subprocess.Popen(words, stderr=subprocess.DEVNULL, **how))
            return children[-1]
        try:
            open(f"{home}/ballastd.toml", "w", encoding="ascii").close()
            start(f"{programs}/ballastd", "--config", f"{home}/ballastd.toml", "--runtime-dir", home)
            # The daemon knows a VMM by the name of its program.
            vmm = shutil.copy(f"{programs}/ballast-bench", f"{home}/firecracker")
            pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            vms = [start(vmm, "bench-role", json.dumps({"Plain": {"ram_bytes": RAM}}), **pipe) for _ in range(count)]
            for vm in vms:
                vm.stdin.write(b'{"MapHuge": {"percent": 100}}\n')
                vm.stdin.flush()
            for vm in vms:
                vm.stdout.readline()
            api = f"{home}/api.sock"
            ballast = lambda *words: subprocess.run([f"{programs}/ballast", "--socket", api, *words], check=True,
                                                    stdout=subprocess.DEVNULL)
            while not os.path.exists(api):
                time.sleep(0.05)
            ballast("adopt", "--all")
            begun = time.monotonic()
            metrics = ask(api, "/metrics").decode()
            print("metrics_s", round(time.monotonic() - begun, 3))
            lines = [line for line in metrics.splitlines() if line and not line.startswith("#")]
            of_one = [line for line in lines if f'"vm-{vms[0].pid}"' in line]
            print("series", len(lines), "of a VM:", len(of_one))
            # Two samples of the past at least: the chart has a line.
            while len(json.loads(ask(api, "/v1/history"))["at_unix_s"]) < 2:
                time.sleep(1)
            web = start(f"{programs}/ballast", "--socket", api, "web", stdout=subprocess.PIPE)
            address = web.stdout.readline().decode().strip()
            engine = json.loads(ask(api, "/v1/host"))["engine_pid"]
            drive = os.path.join(os.path.dirname(__file__), "drive.py")
            subprocess.run([sys.executable, drive, address, pictures, "--watch", seconds, str(engine)], check=True)
        finally:
            # The keeper ends last: VMs and page go first.
            for child in reversed(children):
                child.terminate()
            for child in children:
                child.wait()


main()

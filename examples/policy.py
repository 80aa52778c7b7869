#!/usr/bin/env python3
"""A policy of one's own: what is left beyond the reservations goes to VMs in proportion to shares times working set.

Usage: policy.py [SOCKET]. Needs the standard library only, and the right to change (root). While it puts a plan before
its lease is over, it decides; when it ends or hangs, the policy that ballastd is set to decides again.
"""
import http.client, json, socket, sys, time

SOCKET = sys.argv[1] if len(sys.argv) > 1 else "/run/ballast/api.sock"
LEASE_MS, EVERY_S, PAGE = 3000, 1.0, 4096
SHARES = {"besteffort": 500}

class Ballast(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(SOCKET)

def ask(method, path, body=None):
    connection = Ballast("ballast", timeout=10)
    connection.request(method, path, body and json.dumps(body))
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        print(answer["detail"], file=sys.stderr)  # which rule the plan breaks; the next one may keep it
    return answer

def decide(snapshot):
    weight, least, most = {}, {}, {}
    spare = snapshot["host"]["budget_bytes"]
    for vm in snapshot["vms"]:
        name, words = vm["name"], vm["settings"]
        shares = SHARES.get(words["class"], 1000) if words["shares"] is None else words["shares"]
        if vm["held"] or shares == 0:  # not ours to limit, and what it uses is not there for others
            spare -= vm["resident_bytes"]
            continue
        most[name] = min(vm["size_bytes"], vm["limit_bytes"] or vm["size_bytes"]) // PAGE * PAGE
        reserved = words["reservation_bytes"] or (most[name] if words["class"] == "guaranteed" else 0)
        least[name] = min(-(-max(reserved, snapshot["host"]["smallest_bytes"]) // PAGE) * PAGE, most[name])
        weight[name] = shares * max(vm["working_set_bytes"] or vm["resident_bytes"], PAGE)
    spare, whole = max(0, spare - sum(least.values())), sum(weight.values())
    return [{"name": n, "limit_bytes": min(most[n], least[n] + spare * weight[n] // whole)} for n in weight]

while True:
    limits = decide(ask("GET", "/v1/snapshot"))
    ask("PUT", "/v1/plan", {"policy": "policy.py", "lease_ms": LEASE_MS, "limits": limits})
    time.sleep(EVERY_S)

//! `ballast-agent`: a program in the guest that reports the guest's memory to the host.
//!
//! Before: an unmodified Linux guest (6.1 or newer; reports need DAMON of 6.10, as in Debian 13's 6.12) whose VMM shows
//! it a virtio-serial port of our name (`ballast run --agent`). After: the engine knows which memory is free, which is
//! cold and what is in it. The agent also gives up memory of a NUMA node on request. The guest does not depend on the
//! agent: when it ends for any reason, the guest has the held memory back. The agent restores the kernel's settings; if
//! it was killed, `--undo` does.
//!
//! Threads: one, which waits for the host and for the next tick. With `--tiering` one more (`tiering`).
//! Units: pages are 4 KiB, numbered by guest-physical address.
//! Promise: it takes a tenth of one CPU at most, the kernel's work for it included, and never more memory than the host
//! asked for and the guest can spare. It obeys only the orders in `ballast_messages::ToGuest`.
//!
//! | File | What |
//! |---|---|
//! | `port` | the virtio-serial port: bytes from and to the host |
//! | `session` | the conversation with the host: the main loop |
//! | `look` | for how long each page was not accessed |
//! | `damon` | the kernel's access monitor, which is asked for each page |
//! | `setting` | settings of the kernel that the agent changes, and restores |
//! | `memory` | where RAM is, and what each page of it holds (`/proc/kpageflags`) |
//! | `report` | ages and contents together: runs of pages, the cheapest to lose first |
//! | `owned` | memory of the agent's own, on a node, whose guest-physical pages are known and stay (`pin`) |
//! | `pace` | the agent's pauses, and its share of a CPU |
//! | `prove` | pages with the host's nonce, by which the host finds the guest's pages |
//! | `balloon` | memory held for the host, page by page, by node |
//! | `vital` | the guest's state: free memory, stall, nodes |
//! | `services` | kernel threads that touch far pages, tuned |
//! | `restores` | how many of the restored pages the kernel's threads touched, and no program |
//! | `tiering` | which memory of the guest's programs is on which node: a crate of its own, called from here |

mod balloon;
mod damon;
mod files;
mod look;
mod memory;
mod owned;
mod pace;
mod pin;
mod port;
mod prove;
mod report;
mod restores;
mod reuse;
mod services;
mod session;
mod setting;
mod tiering;
mod vital;

use std::process::ExitCode;

use ballast_tier::Settings;

const HELP: &str = "\
ballast-agent: tells the host which memory of this guest is cold or free

Usage: ballast-agent [OPTIONS]

Options:
      --port PATH   The virtio-serial port [default: the one named org.ballast.agent.0]
      --undo        Put back what an agent that was killed has set in the kernel, and end
      --tiering     Move memory of programs between the guest's nodes by how hot it is
      --least-mib N, --programs N, --mib-per-s N
                    Tiering: smallest program (64), most programs (8), most that is promoted a second (256)
      --take-over   Tiering: switch the kernel's NUMA balancing off; else nothing moves while it promotes
  -h, --help        Print this
  -V, --version     Print the version
";

/// Each program needs a kdamond.
const MOST_PROGRAMS: u64 = 32;

#[derive(Debug, Default)]
struct Options {
    port: Option<String>,
    tiering: bool,
    settings: Settings,
    undo: bool,
}

fn options(words: impl Iterator<Item = String>) -> Result<Options, String> {
    let (mut options, mut words) = (Options::default(), words);
    while let Some(word) = words.next() {
        let (choice, needs) = (&mut options.settings.choice, format!("{word} needs a value"));
        let mut value = || words.next().ok_or(needs.clone());
        let number = |text: String| text.parse::<u64>().map_err(|_| format!("{word}: {text:?} is no number"));
        match word.as_str() {
            "--port" => options.port = Some(value()?),
            "--least-mib" => choice.least = number(value()?)?.saturating_mul(1 << 20),
            "--programs" => choice.most = number(value()?)?.clamp(1, MOST_PROGRAMS) as usize,
            "--mib-per-s" => options.settings.most_bytes_per_s = number(value()?)?.saturating_mul(1 << 20),
            "--take-over" => options.settings.take_over = true,
            "--tiering" => options.tiering = true,
            "--undo" => options.undo = true,
            "-h" | "--help" => {
                print!("{HELP}");
                std::process::exit(0);
            }
            "-V" | "--version" => {
                println!("ballast-agent {}", env!("CARGO_PKG_VERSION"));
                std::process::exit(0);
            }
            other => return Err(format!("unknown option {other:?}; see --help")),
        }
    }
    Ok(options)
}

fn main() -> ExitCode {
    let run = || -> Result<(), String> {
        let options = options(std::env::args().skip(1))?;
        if options.undo {
            damon::undo();
            setting::undo();
            return Ok(());
        }
        files::handle_signals();
        damon::undo();
        setting::undo();
        let tiering = match options.tiering {
            true => Some(tiering::start(options.settings).map_err(|error| format!("starting tiering: {error}"))?),
            false => None,
        };
        let mut ended = session::run(options.port.as_deref(), tiering.as_ref());
        if let Some(tiering) = tiering {
            // Tiering goes on without a host.
            while let Err(error) = &ended
                && !files::ends()
            {
                eprintln!("ballast-agent: {error}; tiering goes on");
                std::thread::sleep(pace::AGAIN);
                ended = session::run(options.port.as_deref(), Some(&tiering));
            }
            tiering.end();
        }
        ended.map_err(|error| error.to_string())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ballast-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_that_is_not_known_is_named() {
        let words = |words: &[&str]| options(words.iter().map(|word| (*word).to_owned()));
        assert_eq!(words(&["--port", "/dev/vport0p1"]).expect("known").port.as_deref(), Some("/dev/vport0p1"));
        let tiering = words(&["--tiering", "--least-mib", "16", "--programs", "99"]).expect("known");
        let choice = &tiering.settings.choice;
        assert_eq!((tiering.tiering, choice.least, choice.most), (true, 16 << 20, 32));
        assert!(words(&["--least-mib", "many"]).expect_err("no number").contains("\"many\""));
        assert!(words(&["--port"]).is_err() && words(&["--prot"]).expect_err("unknown").contains("--prot"));
    }
}

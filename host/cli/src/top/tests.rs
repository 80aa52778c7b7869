//! Frames of `ballast top` in buffers of several sizes, and the effect of keys.

use ballast_api::{HostStat, Latency, Psi, Stall, VmStat, VmStatus};
use ballast_base::{GIB, MIB};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::*;
use crate::args::Sort;
use ballast_api::History;

fn vm(name: &str, status: VmStatus, resident_mib: u64, far_mib: u64, p99_us: f64) -> VmStat {
    VmStat {
        name: name.into(),
        status,
        size_bytes: 2 * GIB,
        limit_bytes: (far_mib > 0).then_some(GIB),
        resident_bytes: resident_mib * MIB,
        quarantine_bytes: MIB,
        far_bytes: far_mib * MIB,
        zero_bytes: 128 * MIB,
        untouched_bytes: (2048 - 128 - resident_mib - far_mib) * MIB,
        fault_latency: Latency { count: u64::from(p99_us > 0.0), p99_us, ..Latency::default() },
        stall: Stall { some: Psi { avg10: 1.25, ..Psi::default() }, ..Stall::default() },
        ..VmStat::default()
    }
}

fn past(samples: usize) -> History {
    History {
        step_s: 10,
        at_unix_s: (0..samples as u32).map(|at| 1_800_000_000 + at * 10).collect(),
        resident_bytes: (0..samples as u64).map(|at| at * MIB).collect(),
        far_bytes: vec![MIB; samples],
        stall_permille: (0..samples as u16).map(|at| at * 10).collect(),
        restores_per_s: vec![7; samples],
        ..History::default()
    }
}

fn screen() -> Screen {
    let why = "It waits 1.2 % of the time for memory that is far: its operator's limit holds it at 1 GiB.";
    let vms = vec![
        vm("db", VmStatus::Running, 512, 0, 0.0),
        VmStat { why: Some(why.into()), ..vm("web-1", VmStatus::Running, 1024, 512, 38.25) },
        vm("web-2", VmStatus::Blocked, 256, 900, 1234.0),
    ];
    let host = HostStat {
        vms: 3,
        mem_total_bytes: 16 * GIB,
        mem_available_bytes: 9 * GIB,
        store_bytes: GIB,
        store_budget_bytes: 4 * GIB,
        engine_epoch: 7,
        engine_restarts: 2,
        ..HostStat::default()
    };
    let vms_past = [("web-1".to_owned(), past(60))].into();
    let look = Look { at_unix_ms: 1_800_000_000_000, host, vms };
    Screen { look, past: Past { host: past(60), vms: vms_past }, ..Screen::default() }
}

fn drawn(screen: &Screen, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("terminal");
    terminal.draw(|frame| frame.render_widget(screen, frame.area())).expect("draw");
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned() + "\n";
    (0..height).map(line).collect()
}

fn press(screen: &mut Screen, code: KeyCode) -> Asked {
    screen.key(KeyEvent::new(code, KeyModifiers::NONE))
}

fn names(screen: &Screen) -> Vec<String> {
    screen.shown().into_iter().map(|vm| vm.name.clone()).collect()
}

const WIDE: &str = "\
store 1 GiB of 4 GiB | host 9 GiB of 16 GiB available | 3 VMs 0 B | resident 0 B | far 0 B | zero 0 B | saved 0 B
engine 7, 2 died

NAME        STATUS           SIZE      LIMIT   RESIDENT QUARANTINE        FAR       ZERO STALL10     10 MIN  FAULT P99
web-1       running         2 GiB      1 GiB      1 GiB      1 MiB    512 MiB    128 MiB   1.2 %  ▁▂▃▃▄▅▆▇█    38.2 us
db          running         2 GiB       none    512 MiB      1 MiB        0 B    128 MiB   1.2 %                     -
!web-2      blocked         2 GiB      1 GiB    256 MiB      1 MiB    900 MiB    128 MiB   1.2 %               1234 us
";

#[test]
fn a_wide_frame_shows_the_host_and_the_vms_sorted_with_their_past() {
    let screen = screen();
    assert_eq!(screen.plain(118), WIDE, "\n{}", screen.plain(118));
    assert_eq!(drawn(&screen, 118, 7), WIDE);
}

#[test]
fn at_80_columns_names_store_and_the_past_are_readable() {
    let frame = screen().plain(80);
    assert!(frame.lines().all(|line| line.chars().count() <= 80), "{frame}");
    assert!(frame.starts_with("store 1 GiB of 4 GiB | host 9 GiB of 16 GiB available"), "{frame}");
    let head = frame.lines().find(|line| line.starts_with("NAME")).expect("heads");
    let columns: Vec<&str> = head.split_whitespace().collect();
    assert_eq!(columns.join(" "), "NAME STATUS SIZE LIMIT RESIDENT FAR STALL10 10 MIN", "{frame}");
    assert!(frame.contains("\nweb-1 ") && frame.contains("▁▂▃▃▄▅▆▇█"), "{frame}");
}

#[test]
fn at_40_columns_names_store_stall_and_memory_are_readable() {
    let mut screen = screen();
    screen.look.vms[0].name = "a-database-with-a-long-name-0001".into();
    let frame = screen.plain(40);
    assert!(frame.lines().all(|line| line.chars().count() <= 40), "{frame}");
    assert!(frame.starts_with("store 1 GiB of 4 GiB"), "{frame}");
    assert!(frame.contains("STALL10") && frame.contains("512 MiB"), "{frame}");
    assert!(frame.contains("a-database…-name-0001"), "{frame}");
    assert!(frame.contains("\n!web-2"), "{frame}");
}

#[test]
fn one_vm_is_shown_with_why_its_past_and_the_reasons_of_the_policy() {
    let mut screen = screen();
    screen.is_live = true;
    assert_eq!(press(&mut screen, KeyCode::Down), Asked::Nothing);
    assert_eq!(press(&mut screen, KeyCode::Enter), Asked::More);
    assert_eq!((screen.pane, screen.selected.as_deref()), (Pane::Vm, Some("web-1")));
    let decision = ballast_api::DecisionRecord { sentences: vec!["web-1 may use 1 GiB".into()], ..Default::default() };
    screen.more = More { history: past(60), decisions: vec![decision] };
    for (width, height) in [(80, 24), (40, 30)] {
        let frame = drawn(&screen, width, height);
        let whole = frame.split_whitespace().collect::<Vec<_>>().join(" ");
        for wanted in [
            "web-1: paged",
            "It waits 1.2 % of the time for memory that is far: its operator's limit holds it at 1 GiB.",
            "HELD AT 1 GiB: operator 1 GiB, policy none",
            "LAST 9M 50S",
            "<= 59 MiB",
            "<= 59.0 %",
            "- web-1 may use 1 GiB",
        ] {
            assert!(whole.contains(wanted), "no {wanted:?} at {width} columns:\n{frame}");
        }
        assert!(frame.contains('▁') && frame.contains('█'), "{frame}");
    }
    assert_eq!(press(&mut screen, KeyCode::Down), Asked::More);
    assert_eq!(screen.selected.as_deref(), Some("db"));
    assert!(drawn(&screen, 80, 24).contains("It waits 1.2 % of the time for memory."));
    screen.look.vms[0].stall = Stall::default();
    assert!(drawn(&screen, 80, 24).contains("It runs and does not wait."));
    screen.look.vms.clear();
    assert!(drawn(&screen, 80, 24).contains("This VM is gone."));
    press(&mut screen, KeyCode::Esc);
    assert_eq!(screen.pane, Pane::List);
}

#[test]
fn the_last_hour_of_the_host_has_as_many_columns_as_there_is_room_for() {
    let screen = Screen { is_live: true, ..screen() };
    for (width, columns) in [(40, 1), (80, 2), (118, 3)] {
        let frame = drawn(&screen, width, 24);
        let line = frame.lines().find(|line| line.starts_with("resident ")).unwrap_or_else(|| panic!("{frame}"));
        assert_eq!(line.matches("<= ").count(), columns, "{frame}");
        assert!(line.contains('█') && line.contains("<= 59 MiB"), "{frame}");
    }
    assert!(!drawn(&screen, 80, 8).contains("<="), "a low screen has room for VMs alone");
}

#[test]
fn keys_sort_reverse_and_end() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Char('f'));
    assert_eq!(names(&screen), ["web-2", "web-1", "db"]);
    press(&mut screen, KeyCode::Char('r'));
    assert_eq!(names(&screen), ["db", "web-1", "web-2"]);
    press(&mut screen, KeyCode::Char('n'));
    assert_eq!(names(&screen), ["web-2", "web-1", "db"]);
    assert_eq!(screen.sort, Sort::Name);
    assert_eq!(press(&mut screen, KeyCode::Char('q')), Asked::End);
    assert_eq!(screen.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Asked::End);
}

#[test]
fn a_search_is_typed_kept_and_ended() {
    let mut screen = screen();
    screen.is_live = true;
    "/web q".chars().for_each(|letter| assert_eq!(press(&mut screen, KeyCode::Char(letter)), Asked::Nothing));
    assert!(names(&screen).is_empty() && drawn(&screen, 40, 20).contains("/web q_"));
    press(&mut screen, KeyCode::Backspace);
    assert_eq!(names(&screen), ["web-1", "web-2"], "by resident memory");
    for letter in "OPERATOR".chars() {
        press(&mut screen, KeyCode::Char(letter));
    }
    press(&mut screen, KeyCode::Enter);
    assert_eq!((names(&screen), screen.pane), (vec!["web-1".to_owned()], Pane::List), "the reason is searched, too");
    assert_eq!(press(&mut screen, KeyCode::Esc), Asked::Nothing);
    assert_eq!(names(&screen).len(), 3);
    assert_eq!(press(&mut screen, KeyCode::Esc), Asked::End);
}

#[test]
fn help_lists_the_keys_and_any_key_ends_it() {
    let mut screen = screen();
    press(&mut screen, KeyCode::Char('?'));
    let help = drawn(&screen, 80, 24);
    assert!(help.contains("reverses the order") && help.contains("Enter shows it"), "{help}");
    assert_eq!((press(&mut screen, KeyCode::Char('q')), screen.pane), (Asked::Nothing, Pane::List));
}

#[test]
fn an_old_frame_says_that_it_is_old_and_a_warning_of_the_host_is_shown() {
    let mut screen = Screen { error: Some("is ballastd running?".into()), ..screen() };
    screen.look.host.warnings = vec!["The store is full (4 GiB of 4 GiB): nothing more is taken from VMs.".into()];
    let frame = screen.plain(60);
    for wanted in ["figures are old: is ballastd running?", "The store is full (4 GiB of 4 GiB)", "web-1"] {
        assert!(frame.contains(wanted), "no {wanted:?} in\n{frame}");
    }
}

#[test]
fn a_tiny_terminal_is_no_reason_to_fail() {
    for pane in [Pane::List, Pane::Search, Pane::Vm, Pane::Help] {
        for (width, height) in [(0, 0), (1, 1), (5, 2), (20, 3)] {
            let screen = Screen { pane, is_live: true, selected: Some("web-1".into()), ..screen() };
            drawn(&Screen { more: More { history: past(3), ..More::default() }, ..screen }, width, height);
        }
    }
}

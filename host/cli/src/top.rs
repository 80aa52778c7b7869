//! `ballast top`: all VMs, updated. The first line shows the host, each row a VM.
//!
//! Keys: `q` ends; `n z m l f t p` sort by name, size, resident, limit, far, stall, fault time; `r` reverses the order.
//! If the daemon stops responding, the last figures stay on the screen, under a line that says so.

use std::cmp::Ordering;
use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_api::{Client, HostStat, VmStat, VmStatus};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Text;
use ratatui::widgets::{Cell, Row, Table, Widget};
use serde::Serialize;

use crate::args::{Sort, TopArgs};
use crate::exit::{Coded, Exit};
use crate::show;

impl Sort {
    fn of_key(key: char) -> Option<Self> {
        Some(match key {
            'n' => Self::Name,
            'z' => Self::Size,
            'm' => Self::Resident,
            'l' => Self::Limit,
            'f' => Self::Far,
            't' => Self::Stall,
            'p' => Self::Fault,
            _ => return None,
        })
    }

    fn compare(self, a: &VmStat, b: &VmStat) -> Ordering {
        let order = match self {
            Self::Name => Ordering::Equal,
            Self::Size => b.size_bytes.cmp(&a.size_bytes),
            Self::Resident => b.resident_bytes.cmp(&a.resident_bytes),
            Self::Limit => lower_limit(b).cmp(&lower_limit(a)),
            Self::Far => b.far_bytes.cmp(&a.far_bytes),
            Self::Stall => b.stall.some.avg10.total_cmp(&a.stall.some.avg10),
            Self::Fault => b.fault_latency.p99_us.total_cmp(&a.fault_latency.p99_us),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }
}

/// The limit that holds: the operator's or the policy's.
fn lower_limit(vm: &VmStat) -> Option<u64> {
    vm.limit_bytes.into_iter().chain(vm.target_bytes).min()
}

/// One sample of everything.
#[derive(Debug, Serialize)]
struct Look {
    host: HostStat,
    vms: Vec<VmStat>,
}

impl Look {
    fn take(client: &Client) -> Result<Self> {
        Ok(Self { host: client.host()?, vms: client.vms()? })
    }
}

/// Watch, or print one frame.
pub fn run(client: Client, args: TopArgs, json: bool) -> Result<()> {
    // The client would retry for 5 s while engines change, and the screen would stand still. So it does not retry: the
    // screen shows the error, and the next frame asks again.
    let client = if args.once { client } else { client.retry_for(Duration::ZERO) };
    let mut screen = Screen { look: Look::take(&client)?, sort: args.sort, reverse: false, error: None };
    match (json, args.once) {
        (true, true) => show::json(&screen.look),
        (true, false) => loop {
            if !show::print_as_it_is(&(serde_json::to_string(&screen.look)? + "\n"))? {
                return Ok(());
            }
            std::thread::sleep(args.interval_s);
            screen.look = Look::take(&client)?;
        },
        (false, true) => Ok(show::print(&screen.plain(plain_width()))?),
        (false, false) => {
            if !io::stdout().is_terminal() {
                let message = "top needs a terminal; use --once for one plain frame, or --json".into();
                return Err(Coded { exit: Exit::Usage, message }.into());
            }
            let mut terminal = ratatui::try_init().context("Preparing the terminal")?;
            let ended = watch(&mut terminal, &client, &mut screen, args.interval_s);
            ratatui::restore();
            ended
        }
    }
}

fn plain_width() -> u16 {
    const WIDE: u16 = 140;
    if io::stdout().is_terminal() {
        terminal::size().map_or(WIDE, |(width, _)| if width > 0 { width } else { WIDE })
    } else {
        WIDE
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    client: &Client,
    screen: &mut Screen,
    interval: Duration,
) -> Result<()> {
    loop {
        let next = Instant::now() + interval;
        loop {
            terminal.draw(|frame| frame.render_widget(&*screen, frame.area())).context("Drawing")?;
            let left = next.saturating_duration_since(Instant::now());
            if left.is_zero() || !event::poll(left).context("Waiting for a key")? {
                break;
            }
            match event::read().context("Reading a key")? {
                Event::Key(key) if key.kind == KeyEventKind::Press && screen.key(key) => return Ok(()),
                _ => {}
            }
        }
        match Look::take(client) {
            Ok(look) => (screen.look, screen.error) = (look, None),
            Err(error) => screen.error = Some(crate::exit::chain(&error)),
        }
    }
}

/// The state that is drawn.
#[derive(Debug)]
struct Screen {
    look: Look,
    sort: Sort,
    reverse: bool,
    error: Option<String>,
}

/// Columns of a terminal below which `wide_only` columns are not shown.
const WIDE: u16 = 120;

struct Column {
    name: &'static str,
    sort: Option<Sort>,
    width: u16,
    wide_only: bool,
    show: fn(&VmStat) -> String,
}

const fn column(name: &'static str, sort: Option<Sort>, width: u16, show: fn(&VmStat) -> String) -> Column {
    Column { name, sort, width, wide_only: false, show }
}

const fn wide(name: &'static str, show: fn(&VmStat) -> String) -> Column {
    Column { name, sort: None, width: 10, wide_only: true, show }
}

/// The first takes the remaining width; the first [`WORDS`] are words and the others figures.
const COLUMNS: [Column; 11] = [
    column("NAME", Some(Sort::Name), 6, |vm| vm.name.clone()),
    column("STATUS", None, 10, |vm| vm.status.to_string()),
    column("SIZE", Some(Sort::Size), 10, |vm| show::size(vm.size_bytes)),
    column("LIMIT", Some(Sort::Limit), 10, |vm| show::limit(lower_limit(vm))),
    column("RESIDENT", Some(Sort::Resident), 10, |vm| show::size(vm.resident_bytes)),
    wide("QUARANTINE", |vm| show::size(vm.quarantine_bytes)),
    column("FAR", Some(Sort::Far), 10, |vm| show::size(vm.far_bytes)),
    wide("ZERO", |vm| show::size(vm.zero_bytes)),
    wide("UNTOUCHED", |vm| show::size(vm.untouched_bytes)),
    column("STALL10", Some(Sort::Stall), 7, |vm| format!("{:.1} %", vm.stall.some.avg10)),
    column("FAULT P99", Some(Sort::Fault), 10, |vm| match vm.fault_latency.count {
        0 => "-".into(),
        _ => format!("{} us", show::micros(vm.fault_latency.p99_us)),
    }),
];
const WORDS: usize = 2;

impl Screen {
    /// Handle a key. Returns true if the program is to end.
    fn key(&mut self, key: KeyEvent) -> bool {
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char(letter) => {
                if let Some(sort) = Sort::of_key(letter) {
                    self.sort = sort;
                }
            }
            _ => {}
        }
        false
    }

    fn sorted(&self) -> Vec<&VmStat> {
        let mut vms: Vec<&VmStat> = self.look.vms.iter().collect();
        vms.sort_by(|a, b| self.sort.compare(a, b));
        if self.reverse {
            vms.reverse();
        }
        vms
    }

    /// One frame as text, as high as it needs to be.
    fn plain(&self, width: u16) -> String {
        const HEAD_LINES: usize = 3;
        let height = u16::try_from(HEAD_LINES + self.look.vms.len()).unwrap_or(u16::MAX);
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        self.render(buffer.area, &mut buffer);
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| format!("{}\n", line(y).trim_end())).collect()
    }

    fn host_line(&self) -> String {
        let host = &self.look.host;
        let size = show::size;
        let decided = host.state.map_or(String::new(), |state| format!("{}: {state} | ", host.policy));
        format!(
            "{decided}host {} of {} available | {} VMs {}: resident {}, far {}, zero {}, saved {} | store {} of {} \
             | engine {}, {} died",
            size(host.mem_available_bytes),
            size(host.mem_total_bytes),
            host.vms,
            size(host.size_bytes),
            size(host.resident_bytes),
            size(host.far_bytes),
            size(host.zero_bytes),
            size(host.saved_bytes),
            size(host.store_bytes),
            size(host.store_budget_bytes),
            host.engine_epoch,
            host.engine_restarts
        )
    }
}

fn style_of(status: VmStatus) -> Style {
    match status {
        VmStatus::Running => Style::new(),
        VmStatus::Recovering => Style::new().fg(Color::Yellow),
        VmStatus::Blocked | VmStatus::Halted => Style::new().fg(Color::Red),
    }
}

impl Widget for &Screen {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let [host, notice, body] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Min(0)]).areas(area);
        Text::from(self.host_line()).render(host, buffer);
        match &self.error {
            Some(error) => {
                let text = format!("NOT ANSWERING, figures are old: {error}");
                Text::styled(text, Style::new().fg(Color::Red)).render(notice, buffer);
            }
            None if self.look.vms.is_empty() => {
                Text::from("no VM is attached; `ballast run -- qemu-system-x86_64 ...` starts one")
                    .render(notice, buffer);
            }
            None => {}
        }
        let columns = || COLUMNS.iter().enumerate().filter(|(_, column)| area.width >= WIDE || !column.wide_only);
        let cell = |at: usize, text: String, style: Style| {
            let side = if at < WORDS { Alignment::Left } else { Alignment::Right };
            Cell::new(Text::styled(text, style).alignment(side))
        };
        let head = columns().map(|(at, column)| {
            let sorted = column.sort == Some(self.sort);
            let modifier = if sorted { Modifier::BOLD | Modifier::UNDERLINED } else { Modifier::BOLD };
            cell(at, column.name.into(), Style::new().add_modifier(modifier))
        });
        let rows = self.sorted().into_iter().map(|vm| {
            let cells = columns().map(|(at, column)| cell(at, (column.show)(vm), Style::new()));
            Row::new(cells).style(style_of(vm.status))
        });
        let widths = columns().map(|(at, column)| match at {
            0 => Constraint::Min(column.width),
            _ => Constraint::Length(column.width),
        });
        Widget::render(Table::new(rows, widths).header(Row::new(head)), body, buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_api::{Latency, Psi, Stall};
    use ballast_base::{GIB, MIB};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    fn screen() -> Screen {
        let vm = |name: &str, status, resident_mib, far_mib, p99_us| VmStat {
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
        };
        let vms = vec![
            vm("db", VmStatus::Running, 512, 0, 0.0),
            vm("web-1", VmStatus::Running, 1024, 512, 38.25),
            vm("web-2", VmStatus::Blocked, 256, 900, 1234.0),
        ];
        let host = HostStat {
            vms: 3,
            mem_total_bytes: 16 * GIB,
            mem_available_bytes: 9 * GIB,
            engine_epoch: 7,
            engine_restarts: 2,
            ..HostStat::default()
        };
        Screen { look: Look { host, vms }, sort: Sort::Resident, reverse: false, error: None }
    }

    const FRAME: &str = "\
host 9 GiB of 16 GiB available | 3 VMs 0 B: resident 0 B, far 0 B, zero 0 B, saved 0 B | store 0 B of 0 B | engine 7, \
2 died

NAME              STATUS           SIZE      LIMIT   RESIDENT QUARANTINE        FAR       ZERO  UNTOUCHED \
STALL10  FAULT P99
web-1             running         2 GiB      1 GiB      1 GiB      1 MiB    512 MiB    128 MiB    384 MiB   \
1.2 %    38.2 us
db                running         2 GiB       none    512 MiB      1 MiB        0 B    128 MiB    1.4 GiB   \
1.2 %          -
web-2             blocked         2 GiB      1 GiB    256 MiB      1 MiB    900 MiB    128 MiB    764 MiB   \
1.2 %    1234 us
";

    #[test]
    fn a_frame_shows_the_host_and_the_vms_sorted() {
        let screen = screen();
        let mut terminal = Terminal::new(TestBackend::new(124, 6)).expect("terminal");
        terminal.draw(|frame| frame.render_widget(&screen, frame.area())).expect("draw");
        let expected: Vec<String> = FRAME.lines().map(|line| format!("{line:124}")).collect();
        let buffer = terminal.backend().buffer();
        let drawn: Vec<String> =
            (0..6).map(|y| (0..124).map(|x| buffer[(x, y)].symbol()).collect::<String>()).collect();
        assert_eq!(drawn, expected, "\n{}", drawn.join("\n"));
        assert_eq!(screen.plain(124), FRAME);
    }

    #[test]
    fn a_terminal_of_80_columns_shows_whole_columns() {
        let frame = screen().plain(80);
        let rows: Vec<&str> = frame.lines().skip(2).collect();
        assert!(rows[0].ends_with("FAULT P99") && !rows[0].contains("ZERO"), "{frame}");
        assert!(rows[3].starts_with("web-2") && rows[3].ends_with("1234 us"), "{frame}");
    }

    #[test]
    fn keys_sort_reverse_and_end() {
        let mut screen = screen();
        let names = |screen: &Screen| screen.sorted().iter().map(|vm| vm.name.clone()).collect::<Vec<_>>();
        let press = |screen: &mut Screen, key| screen.key(KeyEvent::new(key, KeyModifiers::NONE));
        assert!(!press(&mut screen, KeyCode::Char('f')));
        assert_eq!(names(&screen), ["web-2", "web-1", "db"]);
        press(&mut screen, KeyCode::Char('r'));
        assert_eq!(names(&screen), ["db", "web-1", "web-2"]);
        press(&mut screen, KeyCode::Char('n'));
        assert_eq!(names(&screen), ["web-2", "web-1", "db"]);
        assert!(press(&mut screen, KeyCode::Char('q')));
        assert!(screen.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn an_old_frame_says_that_it_is_old() {
        let screen = Screen { error: Some("is ballastd running?".into()), ..screen() };
        let frame = screen.plain(100);
        assert!(frame.lines().nth(1).is_some_and(|line| line.contains("figures are old")), "{frame}");
        assert!(frame.contains("web-1"), "{frame}");
    }

    #[test]
    fn a_tiny_terminal_is_no_reason_to_fail() {
        for (width, height) in [(0, 0), (1, 1), (5, 2), (20, 3)] {
            let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
            screen().render(buffer.area, &mut buffer);
        }
    }
}

//! `ballast top` on a screen of any size: the host, a list of VMs, one VM, the keys.
//!
//! Before: `screen` has a look. After: cells in a buffer. Promise: names and the store stay readable at 40 columns.

use ballast_api::{History, VmStat, VmStatus};
use ballast_base::text::shown;
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Sparkline, StatefulWidget, Table, TableState, Widget, Wrap};

use super::screen::{Pane, Screen, why};
use crate::args::Sort;
use crate::show;

const BAD: Style = Style::new().fg(Color::Red);
const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);

const WAITS_PERCENT: f64 = 1.0;

/// Lines of the host on a low screen, which has no room for all.
const FEW_LINES: usize = 2;
const LOW: u16 = 12;

const KEYS: &str = "\
Up, Down   select a VM; Enter shows it, Esc goes back
/          search in names, states and reasons; Esc ends the search
n z m l f  sort by name, size, resident, limit, far
t p        sort by stall, fault time; r reverses the order
q          end

STALL10    part of the last 10 s for which the VM waited for memory
10 MIN     the same over the last 10 minutes
!          before a name: it does not run normally
";

struct Column {
    name: &'static str,
    sort: Option<Sort>,
    width: u16,
    /// Columns with low ranks are shown first.
    rank: u8,
    show: fn(&VmStat, &Screen) -> String,
}

const fn column(
    name: &'static str,
    sort: Option<Sort>,
    rank: u8,
    width: u16,
    show: fn(&VmStat, &Screen) -> String,
) -> Column {
    Column { name, sort, width, rank, show }
}

/// The first [`WORDS`] are words, the others figures.
static COLUMNS: [Column; 12] = [
    column("NAME", Some(Sort::Name), 0, 6, |vm, _| name_of(vm)),
    column("STATUS", None, 6, 10, |vm, _| vm.status.to_string()),
    column("SIZE", Some(Sort::Size), 7, 10, |vm, _| show::size(vm.size_bytes)),
    column("LIMIT", Some(Sort::Limit), 3, 10, |vm, _| show::limit(vm.lower_limit())),
    column("RESIDENT", Some(Sort::Resident), 2, 10, |vm, _| show::size(vm.resident_bytes)),
    column("QUARANTINE", None, 9, 10, |vm, _| show::size(vm.quarantine_bytes)),
    column("FAR", Some(Sort::Far), 4, 10, |vm, _| show::size(vm.far_bytes)),
    column("ZERO", None, 10, 10, |vm, _| show::size(vm.zero_bytes)),
    column("UNTOUCHED", None, 11, 10, |vm, _| show::size(vm.untouched_bytes)),
    column("STALL10", Some(Sort::Stall), 1, 7, |vm, _| format!("{:.1} %", vm.stall.some.avg10)),
    column("10 MIN", None, 5, 10, |vm, screen| {
        screen.past.vms.get(&vm.name).map_or_else(String::new, |past| stall_line(past, 10))
    }),
    column("FAULT P99", Some(Sort::Fault), 8, 10, |vm, _| match vm.fault_latency.count {
        0 => "-".into(),
        _ => format!("{} us", show::micros(vm.fault_latency.p99_us)),
    }),
];
const WORDS: usize = 2;
/// Longest name that takes room from other columns, and the room of the two columns that are always there.
const LONG_NAME: u16 = 24;
const STALL_AND_RESIDENT: u16 = 19;

/// The name, marked if the VM does not run normally.
fn name_of(vm: &VmStat) -> String {
    let mark = if vm.status == VmStatus::Running { "" } else { "!" };
    format!("{mark}{}", shown(&vm.name))
}

/// A name of at most `width` columns. Names differ at their ends, so the middle is left out.
fn shortened(name: &str, width: usize) -> String {
    let count = name.chars().count();
    if Span::raw(name).width() <= width {
        return name.to_owned();
    }
    let kept = width.saturating_sub(1);
    let (start, end) = (kept - kept / 2, kept / 2);
    name.chars().take(start).chain(['…']).chain(name.chars().skip(count - end)).collect()
}

/// A line of bars: the last samples, or the highest of each group of them.
fn bars(values: &[u64], most: u64, width: u16) -> String {
    let group = values.len().div_ceil(usize::from(width).max(1)).max(1);
    let data: Vec<u64> = values.rchunks(group).rev().map(|group| group.iter().copied().max().unwrap_or(0)).collect();
    let area = Rect::new(0, 0, width, 1);
    let mut buffer = Buffer::empty(area);
    Sparkline::default().data(&data).max(most.max(1)).render(area, &mut buffer);
    (0..width).map(|x| buffer[(x, 0)].symbol()).collect()
}

type Bars<'a> = (&'static str, &'a [u64], fn(u64) -> String);

fn stall_line(past: &History, width: u16) -> String {
    let values: Vec<u64> = past.stall_permille.iter().map(|part| u64::from(*part)).collect();
    // A bar of full height is a VM that waits for a tenth of the time, or more.
    let most = values.iter().copied().max().unwrap_or(0).max(100);
    bars(&values, most, width)
}

/// Bytes in use, and the most that may be, if that is known.
fn of(bytes: u64, most: u64) -> String {
    let size = show::size(bytes);
    if most == 0 { size } else { format!("{size} of {}", show::size(most)) }
}

fn style_of(status: VmStatus) -> Style {
    match status {
        VmStatus::Running => Style::new(),
        VmStatus::Recovering => Style::new().fg(Color::Yellow),
        VmStatus::Blocked | VmStatus::Halted => BAD,
    }
}

impl Screen {
    /// One frame as text, as high as it needs to be.
    pub fn plain(&self, width: u16) -> String {
        let lines = self.host_lines(width).len() + self.notices(width).len() + 1 + self.look.vms.len();
        let height = u16::try_from(lines).unwrap_or(u16::MAX);
        let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
        self.render(buffer.area, &mut buffer);
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| format!("{}\n", line(y).trim_end())).collect()
    }

    /// The host in lines of at most `width` columns.
    fn host_lines(&self, width: u16) -> Vec<String> {
        let host = &self.look.host;
        let size = show::size;
        let mut parts = vec![
            format!("store {}", of(host.store_bytes, host.store_budget_bytes)),
            format!("host {} available", of(host.mem_available_bytes, host.mem_total_bytes)),
            format!("{} VMs {}", host.vms, size(host.size_bytes)),
            format!("resident {}", size(host.resident_bytes)),
            format!("far {}", size(host.far_bytes)),
            format!("zero {}", size(host.zero_bytes)),
            format!("saved {}", size(host.saved_bytes)),
        ];
        parts.extend(host.state.map(|state| format!("{}: {state}", host.policy)));
        if host.engine_epoch > 0 {
            parts.push(format!("engine {}, {} died", host.engine_epoch, host.engine_restarts));
        }
        let mut lines: Vec<String> = Vec::new();
        for part in parts {
            match lines.last_mut() {
                Some(line) if line.len() + 3 + part.len() <= usize::from(width) => {
                    line.push_str(" | ");
                    line.push_str(&part);
                }
                _ => lines.push(part),
            }
        }
        lines
    }

    /// The host's last hour in one line: as many columns of its history as there is room for.
    fn host_past(&self, width: u16) -> Option<String> {
        const COLUMN: u16 = 38;
        let past = &self.past.host;
        let stall: Vec<u64> = past.stall_permille.iter().map(|part| u64::from(*part)).collect();
        let columns: [Bars<'_>; 3] = [
            ("resident", &past.resident_bytes, show::size),
            ("far", &past.far_bytes, show::size),
            ("stall", &stall, percent),
        ];
        let room = width / (width / COLUMN).clamp(1, 3);
        let drawn = columns.into_iter().take((width / COLUMN).max(1).into()).map(|(name, values, text)| {
            let most = values.iter().copied().max().unwrap_or(0);
            let text = format!(" <= {}", text(most));
            let bars = bars(values, most, room.saturating_sub((name.len() + text.len() + 3) as u16));
            format!("{name} {bars}{text}")
        });
        let drawn: Vec<String> = drawn.collect();
        (past.at_unix_s.len() > 1).then(|| drawn.join("  "))
    }

    /// Lines between the host and the list: errors, the typed search; an empty line if there are none.
    fn notices(&self, width: u16) -> Vec<Line<'_>> {
        let mut lines = Vec::new();
        let mut wrapped = |text: String, style: Style| {
            let mut line = String::new();
            for word in text.split(' ') {
                if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > usize::from(width) {
                    lines.push(Line::styled(std::mem::take(&mut line), style));
                }
                line = if line.is_empty() { word.to_owned() } else { format!("{line} {word}") };
            }
            lines.push(Line::styled(line, style));
        };
        if let Some(error) = &self.error {
            wrapped(format!("NOT ANSWERING, figures are old: {}", shown(error)), BAD);
        }
        if let Some(warning) = self.look.host.warnings.first() {
            wrapped(shown(warning).to_string(), BAD);
        }
        if self.look.vms.is_empty() && self.error.is_none() {
            wrapped("no VM is attached; `ballast run -- qemu-system-x86_64 ...` starts one".into(), Style::new());
        }
        if self.pane == Pane::Search || !self.search.is_empty() {
            let cursor = if self.pane == Pane::Search { "_" } else { "" };
            wrapped(format!("/{}{cursor}", shown(&self.search)), BOLD);
        }
        if lines.is_empty() {
            lines.push(Line::default());
        }
        lines
    }

    /// The columns that fit, and the width of names.
    fn columns(&self, vms: &[&VmStat], width: u16) -> (Vec<(usize, &'static Column)>, u16) {
        let longest = vms.iter().map(|vm| Span::raw(name_of(vm)).width() as u16).max().unwrap_or(0);
        let most = LONG_NAME.min(width.saturating_sub(STALL_AND_RESIDENT)).max(COLUMNS[0].width);
        let name = longest.clamp(COLUMNS[0].width, most).min(width);
        let mut by_rank: Vec<(usize, &Column)> = COLUMNS.iter().enumerate().collect();
        by_rank.sort_by_key(|(_, column)| column.rank);
        let mut left = width - name;
        let mut fit: Vec<_> = by_rank
            .into_iter()
            .take_while(|(at, column)| {
                let fits = *at == 0 || column.width < left;
                left -= if *at > 0 && fits { column.width + 1 } else { 0 };
                fits
            })
            .collect();
        fit.sort_by_key(|(at, _)| *at);
        (fit, name + left)
    }

    fn list(&self, area: Rect, buffer: &mut Buffer) {
        let vms = self.shown();
        let (columns, name_width) = self.columns(&vms, area.width);
        let cell = |at: usize, text: String, style: Style| {
            let side = if at < WORDS { Alignment::Left } else { Alignment::Right };
            Cell::new(Text::styled(text, style).alignment(side))
        };
        let head = columns.iter().map(|(at, column)| {
            let sorted = column.sort == Some(self.sort);
            let style = if sorted { BOLD.add_modifier(Modifier::UNDERLINED) } else { BOLD };
            cell(*at, column.name.into(), style)
        });
        let rows = vms.iter().map(|vm| {
            let cells = columns.iter().map(|(at, column)| {
                let text = (column.show)(vm, self);
                cell(*at, if *at == 0 { shortened(&text, name_width.into()) } else { text }, Style::new())
            });
            Row::new(cells).style(style_of(vm.status))
        });
        let widths = columns.iter().map(|(at, column)| match at {
            0 => Constraint::Length(name_width),
            _ => Constraint::Length(column.width),
        });
        let table = Table::new(rows, widths).header(Row::new(head));
        let at = self.selected.as_ref().and_then(|name| vms.iter().position(|vm| vm.name == *name));
        let mut state = TableState::new().with_selected(at);
        let table = table.row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
        StatefulWidget::render(table, area, buffer, &mut state);
    }

    /// One VM: why it waits, where its memory is, its last hour, the policy's reasons.
    fn vm_lines(&self, vm: &VmStat, width: u16) -> Vec<Line<'static>> {
        let size = show::size;
        let stall = vm.stall.some.avg10;
        let reason = match why(vm) {
            Some(why) => Line::styled(shown(why).to_string(), BAD),
            None if stall > WAITS_PERCENT => {
                Line::styled(format!("It waits {stall:.1} % of the time for memory."), BAD)
            }
            None => Line::raw("It runs and does not wait."),
        };
        let held = format!(
            "HELD AT {}: operator {}, policy {}",
            show::limit(vm.lower_limit()),
            show::limit(vm.limit_bytes),
            show::limit(vm.target_bytes)
        );
        let in_ram = vm.far_bytes.saturating_sub(vm.far_file_bytes + vm.far_remote_bytes);
        let mut lines = vec![
            Line::styled(format!("{}: {}, {}, {}", shown(&vm.name), vm.kind, vm.class, vm.status), BOLD),
            reason,
            Line::raw(format!(
                "MEMORY {}: resident {}, far {}, zero {}, untouched {}",
                size(vm.size_bytes),
                size(vm.resident_bytes),
                size(vm.far_bytes),
                size(vm.zero_bytes),
                size(vm.untouched_bytes)
            )),
            Line::raw(held),
            Line::raw(format!(
                "STORE {} in {} of RAM; {} on disk, {} in a cluster",
                size(in_ram),
                size(vm.store_bytes),
                size(vm.far_file_bytes),
                size(vm.far_remote_bytes)
            )),
            Line::raw(format!(
                "STALL {:.1} % of 10 s, {:.1} % of 5 min; {} restores, {} faults waited at the limit",
                vm.stall.some.avg10,
                vm.stall.some.avg300,
                show::grouped(vm.faults.restore),
                show::grouped(vm.faults.throttled)
            )),
            Line::default(),
        ];
        lines.extend(past_lines(&self.more.history, width));
        if let Some(last) = self.more.decisions.last() {
            lines.push(Line::styled("WHY IT HAS WHAT IT HAS", BOLD));
            lines.extend(last.sentences.iter().map(|text| Line::raw(format!("- {}", shown(text)))));
        }
        lines
    }
}

fn percent(permille: u64) -> String {
    format!("{:.1} %", permille as f64 / 10.0)
}

/// A line of bars for each column of a history that has samples, with the highest value.
fn past_lines(past: &History, width: u16) -> Vec<Line<'static>> {
    if past.at_unix_s.len() < 2 {
        return Vec::new();
    }
    let stall: Vec<u64> = past.stall_permille.iter().map(|part| u64::from(*part)).collect();
    let restores: Vec<u64> = past.restores_per_s.iter().map(|rate| u64::from(*rate)).collect();
    let since = past.at_unix_s[past.at_unix_s.len() - 1].saturating_sub(past.at_unix_s[0]);
    let mut lines = vec![Line::styled(format!("LAST {}", show::age(since.into()).to_uppercase()), BOLD)];
    let columns: [Bars<'_>; 4] = [
        ("resident", &past.resident_bytes, show::size),
        ("far", &past.far_bytes, show::size),
        ("stall", &stall, percent),
        ("restores", &restores, |rate| format!("{rate}/s")),
    ];
    for (name, values, text) in columns.into_iter().filter(|(_, values, _)| !values.is_empty()) {
        let most = values.iter().copied().max().unwrap_or(0);
        let bars = bars(values, most, width.saturating_sub(24));
        lines.push(Line::raw(format!("{name:<9}{bars} <= {}", text(most))));
    }
    lines
}

impl Widget for &Screen {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let mut host = self.host_lines(area.width);
        if self.is_live && area.height < LOW {
            host.truncate(FEW_LINES);
        } else if self.is_live {
            host.extend(self.host_past(area.width));
        }
        let notices = self.notices(area.width);
        let heights = [host.len() as u16, notices.len() as u16];
        let foot = u16::from(self.is_live && area.height >= LOW);
        let [top, notice, body, last] = Layout::vertical([
            Constraint::Length(heights[0]),
            Constraint::Length(heights[1]),
            Constraint::Min(0),
            Constraint::Length(foot),
        ])
        .areas(area);
        Text::from_iter(host).render(top, buffer);
        Text::from(notices).render(notice, buffer);
        let whole = |lines: Vec<Line<'static>>| Paragraph::new(lines).wrap(Wrap { trim: false });
        match (self.pane, self.vm()) {
            (Pane::Help, _) => Text::raw(KEYS).render(body, buffer),
            (Pane::Vm, Some(vm)) => whole(self.vm_lines(vm, area.width)).render(body, buffer),
            (Pane::Vm, None) => Text::raw("This VM is gone.").render(body, buffer),
            _ => self.list(body, buffer),
        }
        let hint = match (self.pane, self.vm().and_then(why)) {
            (Pane::List, Some(why)) => shown(why).to_string(),
            (Pane::Vm, _) => "Esc: all VMs  Up, Down: another VM  ? keys  q end".into(),
            (Pane::Help, _) => "any key: back".into(),
            _ => "? keys  / search  Enter: one VM  q end".into(),
        };
        Line::styled(hint, Style::new().add_modifier(Modifier::DIM)).render(last, buffer);
    }
}

//! The state of `ballast top`, and the effect of keys on it.
//!
//! Before: looks come, keys are pressed. After: `draw` shows the state.

use std::cmp::Ordering;

use ballast_api::VmStat;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::look::{Look, More, Past};
use crate::args::Sort;

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
            Self::Limit => b.lower_limit().cmp(&a.lower_limit()),
            Self::Far => b.far_bytes.cmp(&a.far_bytes),
            Self::Stall => b.stall.some.avg10.total_cmp(&a.stall.some.avg10),
            Self::Fault => b.fault_latency.p99_us.total_cmp(&a.fault_latency.p99_us),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }
}

/// Why a VM waits or keeps its memory; otherwise a warning about its settings.
pub fn why(vm: &VmStat) -> Option<&str> {
    vm.why.as_deref().or_else(|| vm.warnings.first().map(String::as_str))
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pane {
    #[default]
    List,
    /// All VMs, while a search is typed.
    Search,
    Vm,
    Help,
}

/// A request of a key to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    Nothing,
    End,
    /// Figures of the VM that is now shown.
    More,
}

#[derive(Debug, Default)]
pub struct Screen {
    pub look: Look,
    pub past: Past,
    pub more: More,
    pub sort: Sort,
    pub reverse: bool,
    pub pane: Pane,
    /// Words that a listed VM's name, state or reason must have.
    pub search: String,
    pub selected: Option<String>,
    /// Why the figures are old.
    pub error: Option<String>,
    /// Whether keys are read: then the last line shows some of them.
    pub is_live: bool,
}

impl Screen {
    pub fn shown(&self) -> Vec<&VmStat> {
        let search = self.search.to_lowercase();
        let matches = |vm: &&VmStat| {
            let text = format!("{} {} {} {}", vm.name, vm.status, vm.class, why(vm).unwrap_or("")).to_lowercase();
            search.split_whitespace().all(|word| text.contains(word))
        };
        let mut vms: Vec<&VmStat> = self.look.vms.iter().filter(matches).collect();
        vms.sort_by(|a, b| self.sort.compare(a, b));
        if self.reverse {
            vms.reverse();
        }
        vms
    }

    pub fn vm(&self) -> Option<&VmStat> {
        let name = self.selected.as_ref()?;
        self.look.vms.iter().find(|vm| vm.name == *name)
    }

    /// Selects the VM `by` rows below the selected one, or above it.
    fn select(&mut self, by: isize) {
        let names: Vec<String> = self.shown().into_iter().map(|vm| vm.name.clone()).collect();
        let at = self.selected.as_ref().and_then(|name| names.iter().position(|other| other == name));
        let next = at.map_or(0, |at| at.saturating_add_signed(by));
        self.selected = names.get(next).or(names.last()).cloned();
    }

    pub fn key(&mut self, key: KeyEvent) -> Asked {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Asked::End;
        }
        match (self.pane, key.code) {
            (Pane::Help, _) => self.pane = Pane::List,
            (Pane::Search, code) => self.search_key(code),
            (_, KeyCode::Char('q')) => return Asked::End,
            (_, KeyCode::Char('?' | 'h')) => self.pane = Pane::Help,
            (pane, KeyCode::Up | KeyCode::Char('k')) => return self.move_by(pane, -1),
            (pane, KeyCode::Down | KeyCode::Char('j')) => return self.move_by(pane, 1),
            (pane, KeyCode::PageUp) => return self.move_by(pane, -10),
            (pane, KeyCode::PageDown) => return self.move_by(pane, 10),
            (Pane::Vm, KeyCode::Esc | KeyCode::Enter) => self.pane = Pane::List,
            (_, KeyCode::Esc) if self.search.is_empty() => return Asked::End,
            (_, KeyCode::Esc) => self.search.clear(),
            (_, KeyCode::Enter) => {
                if self.vm().is_none() {
                    self.select(0);
                }
                self.pane = if self.selected.is_some() { Pane::Vm } else { Pane::List };
                return Asked::More;
            }
            (_, KeyCode::Char('/')) => (self.pane, self.search) = (Pane::Search, String::new()),
            (_, KeyCode::Char('r')) => self.reverse = !self.reverse,
            (_, KeyCode::Char(letter)) => self.sort = Sort::of_key(letter).unwrap_or(self.sort),
            _ => {}
        }
        Asked::Nothing
    }

    fn move_by(&mut self, pane: Pane, by: isize) -> Asked {
        self.select(by);
        if pane == Pane::Vm { Asked::More } else { Asked::Nothing }
    }

    fn search_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(letter) => self.search.push(letter),
            KeyCode::Backspace => {
                self.search.pop();
            }
            KeyCode::Enter => self.pane = Pane::List,
            KeyCode::Esc => (self.pane, self.search) = (Pane::List, String::new()),
            _ => {}
        }
    }
}

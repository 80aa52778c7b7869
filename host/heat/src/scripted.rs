//! A source for tests: a guest whose touches the test sets.
//!
//! Before: a test sets the pages of each unit that a cycle touches. After: the tracker gets exactly those.
//! Promise: counts the cost of a zap scan, and refuses a second cycle while one runs.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use crate::source::{AccessSource, Cost, CycleReport, PageMap, Seen, UnitId, Watch};

#[derive(Debug, Default)]
pub struct Scripted {
    touched: BTreeMap<UnitId, PageMap>,
    running: Option<Watch>,
    pub fail_start: bool,
    pub fail_end: bool,
}

impl Scripted {
    /// Cost of a touch in a zap scan: of a unit mapped huge (measured: 5.6 us), and of one page (3 us, an estimate).
    const COST: (Duration, Duration) = (Duration::from_nanos(5600), Duration::from_nanos(3000));

    /// Has each later cycle touch these pages of the unit.
    pub fn touch(&mut self, unit: UnitId, pages: PageMap) {
        self.touched.insert(unit, pages);
    }
}

impl AccessSource for Scripted {
    fn start(&mut self, watch: &Watch) -> io::Result<()> {
        if std::mem::take(&mut self.fail_start) {
            return Err(io::Error::other("scripted to fail"));
        }
        if self.running.replace(watch.clone()).is_some() {
            return Err(io::Error::other("a cycle is running"));
        }
        Ok(())
    }

    fn end(&mut self) -> io::Result<CycleReport> {
        let watch = self.running.take().ok_or_else(|| io::Error::other("no cycle is running"))?;
        if std::mem::take(&mut self.fail_end) {
            return Err(io::Error::other("scripted to fail"));
        }
        let of = |unit| self.touched.get(&unit).copied().unwrap_or_default();
        let mut report = CycleReport::default();
        for unit in watch.coarse {
            let touched = !of(unit).is_empty();
            report.cost.guest += if touched { Self::COST.0 } else { Duration::ZERO };
            report.units.push((unit, Seen::Coarse { touched }));
        }
        for unit in watch.fine {
            let touched = of(unit);
            report.cost.guest += Self::COST.1 * touched.count() as u32;
            report.units.push((unit, Seen::Fine { touched }));
        }
        report.units.sort_unstable_by_key(|(unit, _)| *unit);
        report.cost = Cost { cpu: report.cost.guest, ..report.cost };
        Ok(report)
    }
}

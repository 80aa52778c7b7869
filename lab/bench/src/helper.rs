//! The loop of a helper process: read an order, carry it out, write the answer.
//!
//! Before: `worker` started this process and `role` knows what it is. After: exit when the orders end.
//! Threads: one. Units: one line of JSON per order and per answer.
//! Promise: an order that fails has its reason for an answer, and the process takes the next one.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};

use crate::order::{Answer, Order};

/// Carry out each order in turn until they end.
pub(crate) fn obey(mut obey: impl FnMut(Order) -> Result<Answer>) -> Result<()> {
    for line in std::io::stdin().lock().lines() {
        let line = line.context("Reading an order")?;
        let order = serde_json::from_str(&line).with_context(|| format!("Understanding the order {line:?}"))?;
        let answer = obey(order).unwrap_or_else(|error| Answer::Failed(format!("{error:#}")));
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &answer)?;
        out.write_all(b"\n")?;
        out.flush()?;
    }
    Ok(())
}

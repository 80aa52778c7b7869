//! The loop of a helper process: it reads an order, carries it out, and writes the answer.
//!
//! Before: `worker` started this process and `role` knows its role. After: it exits when the orders end.
//! Threads: one. Units: one line of JSON per order and per answer.
//! Promise: an order that fails has the reason as its answer, and the process takes the next order.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};

use crate::order::{Answer, Order};

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
